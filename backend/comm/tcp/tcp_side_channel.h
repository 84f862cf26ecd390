/* Messages beside a communicator whose transport carries none: over TCP connections that are made through it. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_SIDE_CHANNEL_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_SIDE_CHANNEL_H_

#include "backend/comm/messages_wire.h"

/* A communicator's messages_open (comm.h). Connections are those of a tcp communicator with the default config; its
 * exchanges are used while they are made, and never after. Errors: as sluice_comm_create_tcp's. */
sluice_status_t sluice_tcp_open_side_channel(sluice_comm_t* comm, sluice_messages_t* messages,
                                             sluice_wire_t** out_wire);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_SIDE_CHANNEL_H_ */
