// SPDX-License-Identifier: Apache-2.0
/* The descriptors of the transport. A forked child closes its copies.
 *
 * A connection ends when its last descriptor is closed, in whichever process, and close-on-exec does not help in
 * children that do not call exec (data loader workers, checkpoint writers). If a rank were killed while its child
 * lives, its peers would notice only at their deadlines. */
#pragma once

#include <stdint.h>

/* Each returns a descriptor for sluice_tcp_close, closed on exec and by forked children, or -1 with errno. Sockets are
 * non-blocking and have keepalive (tcp_keepalive.h); an accepted one inherits it from its listener. Thread-safe. */
int sluice_tcp_open_socket(int family);
int sluice_tcp_accept(int listener);
int sluice_tcp_open_epoll(void);
int sluice_tcp_open_eventfd(void);
/* Accepts -1. Thread-safe. */
void sluice_tcp_close(int fd);

/* Returns whether `is_it` is 1 for some descriptor of the transport. `is_it` returns at once, and calls nothing of this
 * file. Thread-safe. */
int sluice_tcp_has_descriptor(int (*is_it)(int fd));

/* ---- shutdown of a rank that gives up because it has lost another one: its peers must name the lost rank, although
 * this rank's connections end too ---- */

/* Sends the frame that names the lost rank. Returns 1 if the connection has accepted all of it. */
int sluice_tcp_send_lost_rank(int socket, const void* frame, uint64_t bytes);

/* Returns whether the connection may be closed: the peer has ended its side, or, if it `is_told`, its system has the
 * last frame. Received data is discarded: closing a socket with unread bytes resets the connection and discards what is
 * in flight, and a full connection keeps the peer from ending its side. Never waits. */
int sluice_tcp_is_shut_down(int socket, int is_told);
/* Waits for a millisecond. Returns 0 if the second that peers have has passed since begin_ns. */
int sluice_tcp_shutdown_goes_on(uint64_t begin_ns);
