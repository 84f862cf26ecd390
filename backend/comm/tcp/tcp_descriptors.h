// SPDX-License-Identifier: Apache-2.0
/* The descriptors of the transport, and what a fork does with them: a child closes its copies.
 *
 * A connection ends when the last descriptor of it is closed, whichever process holds it, and closing on exec does not
 * help where nobody calls exec (workers of a data loader, checkpoint writers). A rank that is killed while its child
 * lives would not be missed by its peers before their deadlines. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_DESCRIPTORS_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_DESCRIPTORS_H_

/* Each returns a descriptor for sluice_tcp_close, closed on exec and by forked children, or -1 with errno. Sockets do
 * not block and are watched over (tcp_keepalive.h); an accepted one has that from its listener. Thread-safe. */
int sluice_tcp_open_socket(int family);
int sluice_tcp_accept(int listener);
int sluice_tcp_open_epoll(void);
int sluice_tcp_open_eventfd(void);
/* Takes -1 as well. Thread-safe. */
void sluice_tcp_close(int fd);

/* Whether `is_it` is 1 for a descriptor of the transport. It returns at once, and calls nothing of here. Thread-safe.
 */
int sluice_tcp_has_descriptor(int (*is_it)(int fd));

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_DESCRIPTORS_H_ */
