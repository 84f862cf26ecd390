// SPDX-License-Identifier: Apache-2.0
/* Messages over sized messages of a host: of the MPI plugin, or of a host's process group.
 *
 * A frame of fixed size carries the head and, if it fits, the payload; a larger payload follows as a second message,
 * which is received in place. Both are copied before they are sent, one message to a peer at a time: MPI cannot cancel
 * a send, so it must not read the owner's memory. One thread progresses all messages. */
#pragma once

#include "backend/comm/messages_wire.h"
#include "backend/comm/sized_messages.h"

/* The messages_open of a communicator with such messages. sized is borrowed until the wire is closed. */
sluice_status_t sluice_host_messages_open(sluice_comm_t* comm, const sluice_sized_messages_t* sized, void* user,
                                          sluice_messages_t* messages, sluice_wire_t** out_wire);
