// SPDX-License-Identifier: Apache-2.0
/* Messages over TCP: connections of their own, separate from those of exchanges, and a thread.
 *
 * The connections are separate because data of an exchange stays in its socket until the exchange is started, and would
 * block a message after it; and because exchanges are moved by the thread that waits for them, without a lock. The
 * thread reads everything as soon as it arrives, so no sender ever waits for a receive; it writes what the sockets
 * accept. A small message on an idle connection is written by the thread that sends it, which saves a wake-up.
 *
 *   tcp_messages.c        open, close, the thread, calls of the endpoint
 *   tcp_messages_move.c   bytes in and out of one peer's connection, and which connections give way */
#pragma once

#include <pthread.h>

#include "backend/comm/messages_wire.h"
#include "backend/comm/tcp/tcp_connect.h"
#include "backend/comm/tcp/tcp_connection.h"

/* Collective over `comm`, of any transport, whose exchanges make the connections. Errors: as sluice_tcp_connect;
 * NO_MEMORY, EXTERNAL (no descriptor or thread left) on this rank alone. */
sluice_status_t sluice_tcp_messages_open(sluice_comm_t* comm, const sluice_tcp_way_t* way, sluice_messages_t* messages,
                                         sluice_wire_t** out_wire);

/* ---- private to these files -------------------------------------------------------------------------------------- */

typedef struct tcp_messages_peer_s {
  /* Outgoing; guarded by the wire's mutex. */
  sluice_link_t queue;
  int32_t out_error; /* an error of a send, which the system reports only once */
  /* Incoming; used only by the thread. */
  uint32_t in_used; /* bytes of `in` that have been received */
  sluice_frame_t in;
  sluice_message_arrival_t* arrival; /* of the message being received */
  uint64_t arrived;                  /* bytes of its head and payload */
} tcp_messages_peer_t;

typedef struct tcp_wire_s {
  sluice_wire_t base;
  sluice_messages_t* messages;
  int32_t rank;
  int32_t world_size;
  uint64_t bytes; /* of this block */
  int epoll;
  int wake; /* eventfd: there is work for the thread */
  /* [W]. can_write and is_told are guarded by the mutex; only the thread uses the other members while it runs. */
  sluice_tcp_connection_t* connections;
  int32_t is_open; /* the thread runs and the mutex exists */
  pthread_t thread;
  uint64_t looked_ns; /* used by the thread: when it last checked for silent peers */
  pthread_mutex_t mutex;
  int32_t is_dead;    /* guarded by the mutex: the endpoint has failed, nothing is sent any more */
  int32_t is_closing; /* guarded by the mutex: the thread ends */
  int32_t gives_way;  /* guarded by the mutex, as the following: all other traffic of this process goes first */
  int32_t is_waiting; /* it gives way now */
  uint64_t waits_ns;  /* since when; 0: it does not wait */
  tcp_messages_peer_t peers[];
} tcp_wire_t;

/* Sends the messages to this peer as far as the system accepts them and it is their turn. Call with the mutex held. */
void sluice_tcp_messages_push(tcp_wire_t* wire, int32_t peer);
/* Receives from this peer, up to a bound, so that no peer delays others. Returns 1 if there may be more. Losses are
 * only marked. */
int sluice_tcp_messages_pull(tcp_wire_t* wire, int32_t peer);

/* Priorities of connections. Connections that give way carry data that can wait: state that moves while training runs.
 *
 * All connections of a process share its links, and data in the system's queues cannot be overtaken. So a connection
 * that gives way has little data in flight at a time, and sends nothing new while any other connection of the process
 * has more than a few unconfirmed packets: a message of another connection waits for at most a few packets. On links
 * that are never free, a piece is sent now and then, so that the data does arrive. */

/* On a connection that gives way: payload of one system call, and so of one check of the others. */
#define SLUICE_TCP_PIECE_BYTES UINT64_C(16384)
/* The interval at which it checks again. */
enum { SLUICE_TCP_TURN_MS = 1 };

/* Sets this for a socket from now on. May be changed while bytes are in flight. Thread-safe. */
void sluice_tcp_set_gives_way(int fd, int gives_way);
