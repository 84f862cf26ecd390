/* How a peer is noticed whose machine says nothing any more: no power, or no network in between. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_SILENCE_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_SILENCE_H_

enum { SLUICE_TCP_SILENCE_S = 12 };

/* On an idle connection the system itself asks the peer's after a while, and ends it when nothing is answered for
 * SLUICE_TCP_SILENCE_S: whoever waits wakes with ETIMEDOUT, or with what the network said instead. Before the socket
 * connects or listens. */
void sluice_tcp_watch_over(int fd);
/* 1: there are bytes for the peer, and its system has been asked several times in vain to take them and has said
 * nothing for SLUICE_TCP_SILENCE_S. For connections that are not idle, on which the system asks no more than that. */
int sluice_tcp_is_silent(int fd);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_SILENCE_H_ */
