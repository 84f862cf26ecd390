/* Processes that share a mesh of sockets, made before they are forked, and by it a host communicator: for addresses and
 * small exchanges, which fit into the sockets. */
#ifndef SLUICE_CAPI_TEST_MIGRATION_MESH_H_
#define SLUICE_CAPI_TEST_MIGRATION_MESH_H_

#include "sluice/comm.h"

enum { MESH_MAX_RANKS = 8 };

typedef struct mesh_s {
  int world;
  int sockets[MESH_MAX_RANKS][MESH_MAX_RANKS];
} mesh_t;

/* What one process has of it, and the communicator of some of its ranks. */
typedef struct mesh_end_s {
  int rank, world;
  int sockets[MESH_MAX_RANKS]; /* by rank; -1: the own */
  void* recv[MESH_MAX_RANKS];
  uint64_t recv_bytes[MESH_MAX_RANKS];
} mesh_end_t;

int mesh_open(mesh_t* mesh, int world); /* 1: it stands */
void mesh_close(mesh_t* mesh);
/* In a child: its own end, all others closed. */
void mesh_take(mesh_t* mesh, int rank, mesh_end_t* out_end);
/* Without one of the ranks, those behind it move up by one. */
void mesh_leave_out(const mesh_end_t* end, int rank, mesh_end_t* out_end);
/* out_comm: end lives as long. */
sluice_status_t mesh_comm(mesh_end_t* end, uint64_t timeout_ns, sluice_comm_t** out_comm);
/* Each waits until all have come. 0: one has gone. */
int mesh_meet(mesh_end_t* end);

#endif /* SLUICE_CAPI_TEST_MIGRATION_MESH_H_ */
