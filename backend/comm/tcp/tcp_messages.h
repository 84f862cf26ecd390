// SPDX-License-Identifier: Apache-2.0
/* Messages over TCP: connections of their own beside the exchanges', and a thread.
 *
 * Of their own, because what an exchange has not asked for stays in its sockets, and a message behind it would be stuck
 * there; and because exchanges are moved by whoever waits for them, without a lock. The thread reads whatever comes, as
 * soon as it comes, so nobody who sends ever waits for a receive; it writes what the sockets take. A small message on
 * an idle connection is written by the thread that sends it: that saves waking another one.
 *
 *   tcp_messages.c        open, close, the thread, what the endpoint calls
 *   tcp_messages_move.c   bytes in and out of one peer's connection */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_MESSAGES_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_MESSAGES_H_

#include <pthread.h>

#include "backend/comm/messages_wire.h"
#include "backend/comm/tcp/tcp_connect.h"
#include "backend/comm/tcp/tcp_priority.h"
#include "backend/comm/tcp/tcp_keepalive.h"

/* Collective over `comm`, of any transport, by whose exchanges the connections are made.
 * Errors: as sluice_tcp_connect's; NO_MEMORY, EXTERNAL (no descriptor or thread left) on this rank alone. */
sluice_status_t sluice_tcp_messages_open(sluice_comm_t* comm, const sluice_tcp_way_t* way, sluice_messages_t* messages,
                                         sluice_wire_t** out_wire);

/* ---- private to these files -------------------------------------------------------------------------------------- */

enum { TCP_PEER_LIVE = 0, TCP_PEER_LEFT, TCP_PEER_LOST };

typedef struct tcp_messages_peer_s {
  int socket;
  /* Out: under the wire's mutex. */
  sluice_outgoing_t* first;
  sluice_outgoing_t* last;
  int32_t can_write; /* not known to be full; edges of epoll set it */
  int32_t out_error; /* what a send was told, which the system says once */
  int32_t is_told;   /* this rank has failed for another's sake, and said so here */
  /* In: the thread's alone. */
  int32_t state; /* TCP_PEER_* */
  int32_t native_error;
  int32_t can_read;
  int32_t low_water;
  uint32_t in_used; /* bytes of `in` that are there */
  sluice_frame_t in;
  sluice_message_arrival_t* arrival; /* of the message that is coming in */
  uint64_t arrived;                  /* of its head and payload */
  sluice_tcp_keepalive_t silence;
  uint32_t said; /* bytes of the farewell that are out */
} tcp_messages_peer_t;

typedef struct tcp_wire_s {
  sluice_wire_t base;
  sluice_messages_t* messages;
  int32_t rank;
  int32_t world_size;
  uint64_t bytes; /* of this block */
  int epoll;
  int wake;        /* eventfd: there is something for the thread */
  int* sockets;    /* [W], as sluice_tcp_connect fills them */
  int32_t is_open; /* the thread runs, the mutex is there */
  pthread_t thread;
  uint64_t looked_ns; /* the thread's: when it has looked for silent peers */
  pthread_mutex_t mutex;
  int32_t is_dead;    /* under the mutex: the endpoint has failed, nothing is sent any more */
  int32_t is_closing; /* under the mutex: the thread ends */
  int32_t gives_way;  /* under the mutex, as what follows: all else of this process goes first */
  int32_t is_waiting; /* for that, now */
  uint64_t waits_ns;  /* since when; 0: it does not */
  tcp_messages_peer_t peers[];
} tcp_wire_t;

/* Gives the system what it takes of the messages to this peer, and what is their turn. Under the mutex. */
void sluice_tcp_messages_push(tcp_wire_t* wire, int32_t peer);
/* Takes what has come from this peer, up to a bound, so that no peer keeps others waiting: 1: there may be more. Losses
 * only mark the peer. */
int sluice_tcp_messages_pull(tcp_wire_t* wire, int32_t peer);
/* Tells the socket for how many bytes to wake the thread. 1: that has changed, and as many may be there already. */
int sluice_tcp_messages_set_low_water(tcp_messages_peer_t* peer);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_MESSAGES_H_ */
