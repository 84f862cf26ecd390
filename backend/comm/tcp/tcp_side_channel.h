// SPDX-License-Identifier: Apache-2.0
/* TCP connections, made through a communicator, for traffic that its own transport cannot carry, or not well: messages,
 * and headers of a communicator of device memory. */
#pragma once

#include "backend/comm/messages_wire.h"

/* A communicator's messages_open (comm.h). The connections are those of a tcp communicator with the default config;
 * exchanges of `comm` are used only while they are made. Errors: as sluice_comm_create_tcp. */
sluice_status_t sluice_tcp_open_side_channel(sluice_comm_t* comm, sluice_messages_t* messages,
                                             sluice_wire_t** out_wire);

/* Makes a tcp communicator of the same ranks, with the default config, for headers of `comm`, which owns it: it keeps
 * no reference, and leaves notes and interrupts to `comm`. It is made on all ranks or on none, unless an error breaks
 * `comm`. Errors: as sluice_comm_create_tcp. */
sluice_status_t sluice_tcp_open_headers(sluice_comm_t* comm, sluice_comm_t** out_tcp);
