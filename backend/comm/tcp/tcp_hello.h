// SPDX-License-Identifier: Apache-2.0
/* The first words on a connection, after which both ends know that the other belongs to the group, and which rank it
 * is. Whoever accepts a connection, or is found at an address, may be anybody: nothing is believed before that.
 *
 *   1. connecting rank  -> listening rank    hello: who, whom it means, a challenge
 *   2. listening rank   -> connecting rank   a challenge of its own, and a proof
 *   3. connecting rank  -> listening rank    a proof: the listening rank keeps the connection
 *   4. listening rank   -> connecting rank   welcome: the connecting rank keeps it
 *
 * A proof is a code of both challenges and ranks (tcp_mac.h) under the listening rank's secret, which travels through
 * the parent alone. So what a stranger has seen of one connection opens no other, of this group or of a later one. A
 * rank sends its proof on one connection at a time, and leaves that only when it has ended: both ends keep the same. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_HELLO_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_HELLO_H_

#include "backend/comm/tcp/tcp_address.h"
#include "backend/comm/tcp/tcp_mac.h"

/* In place of a rank: where ranks meet that do not know each other's cards yet (tcp_rendezvous.h). It listens, and
 * proofs there are under the group's key. */
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
  SLUICE_TCP_AWAITS_WELCOME, /* the other end is the rank that is meant */
  SLUICE_TCP_AWAITS_HELLO,   /* the first of an accepted connection */
  SLUICE_TCP_AWAITS_PROOF,
  SLUICE_TCP_GREETED
} sluice_tcp_phase_t;

typedef struct sluice_tcp_hello_s {
  int fd;
  sluice_tcp_phase_t phase;
  int32_t peer;    /* accepted: who it says it is, -1 before that */
  int32_t attempt; /* which of the peer's addresses; -1: accepted */
  uint64_t began_ns;
  uint64_t until_ns;
  sluice_tcp_greeting_t greeting; /* 1 */
  uint8_t answer[SLUICE_TCP_MAC_BYTES];
  uint8_t in[2 * SLUICE_TCP_MAC_BYTES]; /* the message that is being read */
  uint32_t in_used;
} sluice_tcp_hello_t;

/* What has become of a connection. Below 0: -errno, or SLUICE_TCP_IS_STRANGER; then it is to be closed. */
enum { SLUICE_TCP_GOES_ON = 0, SLUICE_TCP_IS_DONE = 1, SLUICE_TCP_IS_STRANGER = -4096 };

/* Connects to this address of `peer`, without waiting. 0 or -errno; fd is -1 then. */
int sluice_tcp_hello_connect(const sluice_tcp_group_t* group, int32_t peer, const struct sockaddr_storage* target,
                             socklen_t length, sluice_tcp_hello_t* out_hello);
/* Takes the descriptor of an accepted connection. */
void sluice_tcp_hello_accept(int fd, sluice_tcp_hello_t* out_hello);
/* What to poll for. */
short sluice_tcp_hello_events(const sluice_tcp_hello_t* hello);
/* Does what can be done without waiting. IS_DONE: the descriptor is the connection to `peer`. */
int sluice_tcp_hello_advance(const sluice_tcp_group_t* group, sluice_tcp_hello_t* hello);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_HELLO_H_ */
