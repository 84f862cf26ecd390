// SPDX-License-Identifier: Apache-2.0
/* Messages over somebody else's messages of known sizes: of MPI's plugin, of a host's process group.
 *
 * A frame of fixed size goes ahead, with the head and, where it fits, the payload in it; a larger payload follows as a
 * second message, received where it stays. Both are copied when they are sent: MPI takes no message back, so what it
 * reads must not be the owner's. One thread looks after what is under way. */
#ifndef SLUICE_BACKEND_COMM_HOST_HOST_MESSAGES_H_
#define SLUICE_BACKEND_COMM_HOST_HOST_MESSAGES_H_

#include "backend/comm/messages_wire.h"
#include "backend/comm/sized_messages.h"

/* The messages_open of a communicator that has such messages. sized is borrowed until the wire is closed. */
sluice_status_t sluice_host_messages_open(sluice_comm_t* comm, const sluice_sized_messages_t* sized, void* user,
                                          sluice_messages_t* messages, sluice_wire_t** out_wire);

#endif /* SLUICE_BACKEND_COMM_HOST_HOST_MESSAGES_H_ */
