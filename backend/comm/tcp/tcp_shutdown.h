// SPDX-License-Identifier: Apache-2.0
/* How a rank leaves that has given up because it has lost another: its peers are to name that one, and this rank's
 * connections end too. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_SHUTDOWN_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_SHUTDOWN_H_

#include <stdint.h>

/* Sends the frame that says which rank was lost. 1: the connection has taken all of it. */
int sluice_tcp_send_lost_rank(int socket, const void* frame, uint64_t bytes);

/* Whether the connection may be closed: the peer has ended its side, or, where it `is_told`, its system has the last
 * words. What has come is thrown away: a connection that is closed with bytes unread is reset, which takes back what is
 * under way, and a full one keeps the peer from ending its side. Never waits. */
int sluice_tcp_is_shut_down(int socket, int is_told);
/* Waits for a millisecond. 0: a second has passed since begin_ns, which is what peers have for it. */
int sluice_tcp_shutdown_goes_on(uint64_t begin_ns);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_SHUTDOWN_H_ */
