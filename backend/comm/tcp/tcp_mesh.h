// SPDX-License-Identifier: Apache-2.0
/* Every rank of the group connects to every other, while strangers do what they like. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_MESH_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_MESH_H_

#include "backend/base/alloc.h"
#include "backend/comm/tcp/tcp_hello.h"
#include "backend/comm/tcp/tcp_listen.h"

typedef struct sluice_tcp_mesh_s sluice_tcp_mesh_t;

/* All that a meeting needs, so that it allocates nothing. Error: NO_MEMORY. */
sluice_status_t sluice_tcp_mesh_create(int32_t rank, int32_t world_size, sluice_tcp_mesh_t** out_meeting);
void sluice_tcp_mesh_destroy(sluice_tcp_mesh_t* meeting); /* accepts NULL */
/* Fills sockets[W], -1 before, as far as it gets; the caller closes them. Connections are made to lower ranks, and
 * taken from higher ones. Errors: EXTERNAL, naming the rank that was not reached, or that there are no descriptors. */
sluice_status_t sluice_tcp_mesh_connect(sluice_tcp_mesh_t* meeting, const sluice_tcp_card_t* cards,
                                        const sluice_tcp_listeners_t* listeners, uint64_t deadline_ns, int* sockets);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_MESH_H_ */
