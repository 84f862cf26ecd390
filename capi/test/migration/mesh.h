// SPDX-License-Identifier: Apache-2.0
/* Ranks that may die: processes that share a mesh of sockets, created before the fork. A host communicator over the
 * mesh serves addresses and small exchanges, which fit into the socket buffers. */
#pragma once

#include <stdint.h>

#include "sluice/comm.h"

enum { MESH_MAX_RANKS = 8 };

/* The ends of one rank, and state of its communicator. */
typedef struct mesh_end_s {
  int rank, world;
  int sockets[MESH_MAX_RANKS]; /* by rank; -1: none */
  void* recv[MESH_MAX_RANKS];
  uint64_t recv_bytes[MESH_MAX_RANKS];
} mesh_end_t;

/* The body of a rank; returns 0, or the place of its failure. */
typedef int (*mesh_rank_fn_t)(mesh_end_t* end, void* shared);

/* Memory that forked ranks share with their parent, zeroed. */
void* mesh_share(uint64_t bytes);
void mesh_unshare(void* shared, uint64_t bytes);
/* Forks a process for each rank and waits for all. The victim may die; it is killed when the others have ended. Returns
 * whether all others returned 0, and prints those that did not. */
int mesh_run(int world, int victim, mesh_rank_fn_t rank, void* shared);
/* The ends without those of `rank`; later ranks move up by one. */
void mesh_leave_out(const mesh_end_t* end, int rank, mesh_end_t* out_end);
/* end must outlive the communicator. */
sluice_status_t mesh_comm(mesh_end_t* end, uint64_t timeout_ns, sluice_comm_t** out_comm);
/* A barrier. Returns 0 if a rank is gone. */
int mesh_meet(mesh_end_t* end);
