// SPDX-License-Identifier: Apache-2.0
/* Connects every rank of the group to every other, undisturbed by connections of other programs. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/comm/tcp/tcp_hello.h"
#include "backend/comm/tcp/tcp_listen.h"

typedef struct sluice_tcp_mesh_s sluice_tcp_mesh_t;

/* Allocates all memory that connecting needs. Error: NO_MEMORY. */
sluice_status_t sluice_tcp_mesh_create(int32_t rank, int32_t world_size, sluice_tcp_mesh_t** out_meeting);
void sluice_tcp_mesh_destroy(sluice_tcp_mesh_t* meeting); /* accepts NULL */
/* Fills sockets[W], -1 before, also in part on a failure; the caller closes them. Connects to lower ranks and accepts
 * higher ones. Errors: EXTERNAL, naming the rank that was not reached, or that there are no descriptors. */
sluice_status_t sluice_tcp_mesh_connect(sluice_tcp_mesh_t* meeting, const sluice_tcp_card_t* cards,
                                        const sluice_tcp_listeners_t* listeners, uint64_t deadline_ns, int* sockets);
