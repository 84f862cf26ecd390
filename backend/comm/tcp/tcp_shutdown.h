// SPDX-License-Identifier: Apache-2.0
/* Shutdown of a rank that gives up because it has lost another one: its peers must name the lost rank, although this
 * rank's connections end too. */
#pragma once

#include <stdint.h>

/* Sends the frame that names the lost rank. Returns 1 if the connection has accepted all of it. */
int sluice_tcp_send_lost_rank(int socket, const void* frame, uint64_t bytes);

/* Returns whether the connection may be closed: the peer has ended its side, or, if it `is_told`, its system has the
 * last frame. Received data is discarded: closing a socket with unread bytes resets the connection and discards what is
 * in flight, and a full connection keeps the peer from ending its side. Never waits. */
int sluice_tcp_is_shut_down(int socket, int is_told);
/* Waits for a millisecond. Returns 0 if the second that peers have has passed since begin_ns. */
int sluice_tcp_shutdown_goes_on(uint64_t begin_ns);
