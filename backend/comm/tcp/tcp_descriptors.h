// SPDX-License-Identifier: Apache-2.0
/* The descriptors of the transport. A forked child closes its copies.
 *
 * A connection ends when its last descriptor is closed, in whichever process, and close-on-exec does not help in
 * children that do not call exec (data loader workers, checkpoint writers). If a rank were killed while its child
 * lives, its peers would notice only at their deadlines. */
#pragma once

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
