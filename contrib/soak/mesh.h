/* Ranks that are processes of one machine and have a stream between every two of them: enough of a communicator to find
 * each other over TCP. */
#ifndef SLUICE_INTEGRATION_TESTS_SOAK_MESH_H_
#define SLUICE_INTEGRATION_TESTS_SOAK_MESH_H_

#include "sluice/sluice.h"

enum { MESH_MOST_RANKS = 8 };

/* Takes the descriptors [world_size], the own one is -1, also where it fails. */
sluice_status_t mesh_create(const int* fds, int rank, int world_size, uint64_t timeout_ns, sluice_comm_t** out_comm);

#endif /* SLUICE_INTEGRATION_TESTS_SOAK_MESH_H_ */
