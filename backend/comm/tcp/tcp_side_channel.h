// SPDX-License-Identifier: Apache-2.0
/* What a communicator's own transport does not carry, or not well, over TCP connections that are made through it:
 * messages, and headers of a communicator that moves rows of a device. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_SIDE_CHANNEL_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_SIDE_CHANNEL_H_

#include "backend/comm/messages_wire.h"

/* A communicator's messages_open (comm.h). Connections are those of a tcp communicator with the default config; its
 * exchanges are used while they are made, and never after. Errors: as sluice_comm_create_tcp's. */
sluice_status_t sluice_tcp_open_side_channel(sluice_comm_t* comm, sluice_messages_t* messages,
                                             sluice_wire_t** out_wire);

/* A tcp communicator of the same ranks, with the default config, for headers of `comm`, which owns it: it keeps no
 * reference, notes and interrupts are left to `comm`. On all ranks or on none, unless an error breaks `comm`. Errors:
 * as sluice_comm_create_tcp's. */
sluice_status_t sluice_tcp_open_headers(sluice_comm_t* comm, sluice_comm_t** out_tcp);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_SIDE_CHANNEL_H_ */
