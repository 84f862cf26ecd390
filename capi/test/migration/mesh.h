// SPDX-License-Identifier: Apache-2.0
/* Ranks that may die: processes that share a mesh of sockets, created before they are forked, and over it a host
 * communicator for addresses and small exchanges, which fit into the socket buffers. */
#ifndef SLUICE_CAPI_TEST_MIGRATION_MESH_H_
#define SLUICE_CAPI_TEST_MIGRATION_MESH_H_

#include <stdint.h>

#include "sluice/comm.h"

enum { MESH_MAX_RANKS = 8 };

/* The ends of one process, and the communicator of some of its ranks. */
typedef struct mesh_end_s {
  int rank, world;
  int sockets[MESH_MAX_RANKS]; /* by rank; -1: the own */
  void* recv[MESH_MAX_RANKS];
  uint64_t recv_bytes[MESH_MAX_RANKS];
} mesh_end_t;

/* The body of a rank; returns 0, or the place of its failure. */
typedef int (*mesh_rank_fn_t)(mesh_end_t* end, void* shared);

/* Memory that forked ranks share with their parent, zeroed. */
void* mesh_share(uint64_t bytes);
void mesh_unshare(void* shared, uint64_t bytes);
/* Forks a process per rank and waits for all. The victim may die, and is killed when the others have ended. Returns
 * whether all others returned 0; if not, it prints which one. */
int mesh_run(int world, int victim, mesh_rank_fn_t rank, void* shared);
/* Without one of the ranks; later ranks move up by one. */
void mesh_leave_out(const mesh_end_t* end, int rank, mesh_end_t* out_end);
/* out_comm: end lives as long. */
sluice_status_t mesh_comm(mesh_end_t* end, uint64_t timeout_ns, sluice_comm_t** out_comm);
/* A barrier. 0: a rank is gone. */
int mesh_meet(mesh_end_t* end);

#endif /* SLUICE_CAPI_TEST_MIGRATION_MESH_H_ */
