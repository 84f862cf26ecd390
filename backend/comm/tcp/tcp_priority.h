// SPDX-License-Identifier: Apache-2.0
/* Which connections go first. Those that give way carry what can wait: state that moves while training runs.
 *
 * All connections of a process share its links, and what is once in the system's queues cannot be overtaken. So a
 * connection that gives way has little under way at a time, and nothing new while any other connection of the process
 * has more than a few packets that its peer's system has not confirmed: a message of another one waits behind a few of
 * them at most. Links that are never free let a piece through now and then, so that what can wait does arrive. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_PRIORITY_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_PRIORITY_H_

#include <stdint.h>

/* Of a connection that gives way: payload of one system call, and so of one look at the others. */
#define SLUICE_TCP_PIECE_BYTES UINT64_C(16384)
/* So often it looks again. */
enum { SLUICE_TCP_TURN_MS = 1 };

/* For this socket, from now on. May be changed while bytes are under way. Thread-safe. */
void sluice_tcp_set_gives_way(int fd, int gives_way);
/* 1: a connection that gives way may send a piece now. waits_ns: since when it has waited, 0: it does not; kept for the
 * next look. */
int sluice_tcp_is_its_turn(uint64_t* waits_ns, uint64_t now_ns);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_PRIORITY_H_ */
