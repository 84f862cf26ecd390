// SPDX-License-Identifier: Apache-2.0
/* Ranks that share nothing but the address of rank 0 and a secret meet at rank 0, and then use these connections as the
 * parent while they connect (tcp_connect.h).
 *
 *   tcp_rendezvous.c        both ends, after all ranks are there
 *   tcp_rendezvous_join.c   ranks above 0: connect to rank 0, and wait until it has all of them
 *   tcp_rendezvous_root.c   rank 0: accepts the other ranks, and refuses ranks that do not fit
 *
 * Both ends of a connection prove that they have the secret (tcp_hello.h). Neither the secret nor anything from which
 * it could be computed is sent. A connecting rank then says how many ranks it expects. Rank 0 tells waiting ranks which
 * rank is missing. If rank 0 refuses one rank, it refuses all ranks, with the same text. */
#pragma once

#include "backend/comm/tcp/tcp_connect.h"
#include "backend/comm/tcp/tcp_mac.h"

enum { SLUICE_TCP_LEAST_SECRET = 16 };

typedef struct sluice_tcp_rendezvous_s sluice_tcp_rendezvous_t;

/* key: of sluice_tcp_key; root: the address of rank 0. Both are borrowed. Collective over ranks that share nothing yet.
 * Errors, with the rank at fault: MISMATCH (another secret, world size or build; two ranks with the same number),
 * TIMED_OUT (a rank has not come in time), PEER_LOST (rank 0 left), EXTERNAL (no answer, or rank 0 cannot listen),
 * NO_MEMORY. */
sluice_status_t sluice_tcp_rendezvous_open(int32_t rank, int32_t world_size, const sluice_tcp_endpoint_t* root,
                                           const uint8_t* key, uint64_t timeout_ns,
                                           sluice_tcp_rendezvous_t** out_rendezvous);
/* Valid until the rendezvous is closed. */
sluice_tcp_parent_t* sluice_tcp_rendezvous_parent(sluice_tcp_rendezvous_t* rendezvous);
void sluice_tcp_rendezvous_close(sluice_tcp_rendezvous_t* rendezvous); /* accepts NULL */

/* Computes the key of proofs from a secret of at least SLUICE_TCP_LEAST_SECRET bytes. out: [SLUICE_TCP_MAC_BYTES]. */
void sluice_tcp_key(const void* secret, uint64_t bytes, uint8_t* out);

/* ---- private to these files -------------------------------------------------------------------------------------- */

enum {
  SLUICE_MEET_VERSION = 1,
  SLUICE_MEET_WAITS = 0x736c6d77,   /* rank 0 waits for other ranks: sluice_meet_waits_t follows */
  SLUICE_MEET_BEGINS = 0x736c6d62,  /* all ranks are there; nothing follows */
  SLUICE_MEET_RECORDS = 0x736c6d72, /* to rank 0: the sender's record; from rank 0: the records of all ranks */
  SLUICE_MEET_REFUSED = 0x736c6d78  /* all ranks fail: sluice_meet_refused_t follows */
};

/* Sent by a connecting rank after the hello. */
typedef struct sluice_meet_join_s {
  int32_t version;
  int32_t world_size;
  uint64_t card_bytes; /* cards of another build have another size */
} sluice_meet_join_t;

typedef struct sluice_meet_frame_s {
  uint32_t kind;
  uint32_t bytes; /* of what follows */
} sluice_meet_frame_t;

typedef struct sluice_meet_waits_s {
  int32_t missing; /* the lowest rank that has not come */
  int32_t present; /* number of ranks, including rank 0 */
} sluice_meet_waits_t;

typedef struct sluice_meet_refused_s {
  int32_t status, peer, native_code;
  char message[500]; /* terminated */
} sluice_meet_refused_t;

struct sluice_tcp_rendezvous_s {
  sluice_tcp_parent_t base;
  const sluice_tcp_endpoint_t* root;
  const uint8_t* key;
  uint64_t timeout_ns;
  uint64_t deadline_ns; /* for all ranks to be there */
  uint64_t bytes;       /* of this block */
  int64_t* values;      /* [W] */
  int sockets[];        /* [W]; ranks above 0 use only the first; -1: none */
};

sluice_status_t sluice_tcp_rendezvous_join(sluice_tcp_rendezvous_t* m);
sluice_status_t sluice_tcp_rendezvous_gather(sluice_tcp_rendezvous_t* m);

/* Disables Nagle's algorithm: a frame is two sends, of which the second would wait until the first is confirmed. */
void sluice_meet_hurry(int fd);
/* Return 0, or -errno; ECONNRESET if the other end has closed. */
int sluice_meet_send(int fd, const void* data, uint64_t bytes, uint64_t deadline_ns);
int sluice_meet_receive(int fd, void* data, uint64_t bytes, uint64_t deadline_ns);
/* Sends a frame and its data. */
int sluice_meet_send_frame(int fd, uint32_t kind, const void* data, uint64_t bytes, uint64_t deadline_ns);
/* Makes this thread's last error the refusal of all ranks. */
void sluice_meet_refusal(sluice_meet_refused_t* out_refused);
/* Records the refusal as this rank's error. */
sluice_status_t sluice_meet_adopt(const sluice_tcp_rendezvous_t* m, const sluice_meet_refused_t* refused);
/* more: the end of the message. */
sluice_status_t sluice_meet_fail_late(const sluice_tcp_rendezvous_t* m, const sluice_meet_waits_t* waits,
                                      const char* more);
