// SPDX-License-Identifier: Apache-2.0
/* The handshake of a connection, after which both ends know that the other end belongs to the group, and which rank it
 * is. Anybody may connect to a listener or listen at an address, so nothing is trusted before the handshake ends.
 *
 *   1. connecting rank  -> listening rank    hello: sender, intended receiver, a challenge
 *   2. listening rank   -> connecting rank   a challenge of its own, and a proof
 *   3. connecting rank  -> listening rank    a proof: the listening rank keeps the connection
 *   4. listening rank   -> connecting rank   welcome: the connecting rank keeps it
 *
 * A proof is a code of both challenges and ranks (tcp_mac.h) under the listening rank's secret, which is sent only
 * through the parent. So an observer of one connection can open no other, of this group or of a later one. A rank sends
 * its proof on one connection at a time, and gives it up only when it has ended: both ends keep the same connection. */
#pragma once

#include "backend/comm/tcp/tcp_address.h"
#include "backend/comm/tcp/tcp_mac.h"

/* Replaces a rank if ranks do not know each other's cards yet (tcp_rendezvous.h). The meeting point listens, and its
 * proofs use the group's key. */
enum { SLUICE_TCP_MEETING_POINT = -1 };

typedef struct sluice_tcp_group_s {
  int32_t rank;
  int32_t world_size;
  const sluice_tcp_card_t* cards; /* [W] */
  const uint8_t* key;             /* of the meeting point; NULL: there is none */
} sluice_tcp_group_t;

typedef struct sluice_tcp_greeting_s {
  char magic[8];
  int32_t rank; /* of the sender */
  int32_t peer; /* of the receiver */
  uint8_t challenge[SLUICE_TCP_MAC_BYTES];
} sluice_tcp_greeting_t;

typedef enum sluice_tcp_phase_e {
  SLUICE_TCP_CONNECTING = 0,
  SLUICE_TCP_AWAITS_ANSWER,
  SLUICE_TCP_AWAITS_WELCOME, /* the other end has proved to be the intended rank */
  SLUICE_TCP_AWAITS_HELLO,   /* the first phase of an accepted connection */
  SLUICE_TCP_AWAITS_PROOF,
  SLUICE_TCP_GREETED
} sluice_tcp_phase_t;

typedef struct sluice_tcp_hello_s {
  int fd;
  sluice_tcp_phase_t phase;
  int32_t peer;    /* accepted: the rank that it claims to be, -1 before that */
  int32_t attempt; /* index of the peer's address; -1: accepted */
  uint64_t began_ns;
  uint64_t until_ns;
  sluice_tcp_greeting_t greeting; /* 1 */
  uint8_t answer[SLUICE_TCP_MAC_BYTES];
  uint8_t in[2 * SLUICE_TCP_MAC_BYTES]; /* the message being read */
  uint32_t in_used;
} sluice_tcp_hello_t;

/* The state of a connection. Below 0: -errno, or SLUICE_TCP_IS_STRANGER; then it must be closed. */
enum { SLUICE_TCP_GOES_ON = 0, SLUICE_TCP_IS_DONE = 1, SLUICE_TCP_IS_STRANGER = -4096 };

/* Connects to this address of `peer`, without waiting. Returns 0 or -errno, with fd -1. */
int sluice_tcp_hello_connect(const sluice_tcp_group_t* group, int32_t peer, const struct sockaddr_storage* target,
                             socklen_t length, sluice_tcp_hello_t* out_hello);
/* Starts the handshake on an accepted connection, whose descriptor it takes over. */
void sluice_tcp_hello_accept(int fd, sluice_tcp_hello_t* out_hello);
/* Returns the events to poll for. */
short sluice_tcp_hello_events(const sluice_tcp_hello_t* hello);
/* Continues as far as possible without waiting. IS_DONE: the descriptor is the connection to `peer`. */
int sluice_tcp_hello_advance(const sluice_tcp_group_t* group, sluice_tcp_hello_t* hello);
/* Reads a message, of the handshake or after it, into hello->in. Returns IS_DONE if all `bytes` have come; nothing
 * after them is read. */
int sluice_tcp_hello_hear(sluice_tcp_hello_t* hello, uint32_t bytes);

/* The handshakes in progress. */
typedef struct sluice_tcp_hellos_s {
  sluice_tcp_hello_t* list;
  int32_t count;
  int32_t num_accepted; /* entries that this rank accepted; it connected the others */
} sluice_tcp_hellos_t;

/* limit_ns: the handshake fails if it takes longer. */
void sluice_tcp_hellos_add(sluice_tcp_hellos_t* hellos, const sluice_tcp_hello_t* hello, uint64_t now_ns,
                           uint64_t limit_ns);
/* Removes an entry; the last one takes its place. Returns the descriptor, which the caller closes or keeps. */
int sluice_tcp_hellos_remove(sluice_tcp_hellos_t* hellos, int32_t at);
/* Closes the oldest accepted connection that has waited for `age_ns`. Returns 0 if there is none. */
int sluice_tcp_hellos_turn_out_oldest(sluice_tcp_hellos_t* hellos, uint64_t age_ns, uint64_t now_ns);
void sluice_tcp_hellos_close(sluice_tcp_hellos_t* hellos);
