// SPDX-License-Identifier: Apache-2.0
/* Priorities of connections. Connections that give way carry data that can wait: state that moves while training runs.
 *
 * All connections of a process share its links, and data in the system's queues cannot be overtaken. So a connection
 * that gives way has little data in flight at a time, and sends nothing new while any other connection of the process
 * has more than a few unconfirmed packets: a message of another connection waits for at most a few packets. On links
 * that are never free, a piece is sent now and then, so that the data does arrive. */
#pragma once

#include <stdint.h>

/* On a connection that gives way: payload of one system call, and so of one check of the others. */
#define SLUICE_TCP_PIECE_BYTES UINT64_C(16384)
/* The interval at which it checks again. */
enum { SLUICE_TCP_TURN_MS = 1 };

/* Sets this for a socket from now on. May be changed while bytes are in flight. Thread-safe. */
void sluice_tcp_set_gives_way(int fd, int gives_way);
/* Returns 1 if a connection that gives way may send a piece now. waits_ns: since when it has waited (0: it does not
 * wait), kept between calls. */
int sluice_tcp_is_its_turn(uint64_t* waits_ns, uint64_t now_ns);
