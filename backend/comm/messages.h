// SPDX-License-Identifier: Apache-2.0
/* Messages between two ranks, next to the exchanges of a communicator [AxoNN, section III-B: an asynchronous,
 * message-driven pipeline].
 *
 * An *endpoint* is one rank's end of the messages among all ranks of a communicator. It is opened collectively, so that
 * a communicator that never sends a message pays nothing. A *message* has a peer, a 64-bit tag, a small head, and a
 * payload gathered from spans of host memory. Head and payload are bytes: the owner defines byte order and meaning.
 * They are sent as one message, preceded by a frame of fixed size with their sizes, so the receiver need not know them.
 *
 * Sends and posted receives are *requests*: they return at once, and each that succeeds yields one *completion* with
 * the owner's word `user`. One call waits for the next completion of any request. Any number may be outstanding.
 *
 * Matching. A receive takes the oldest message of its (peer, tag) that no receive has taken; a message goes to the
 * oldest receive of its (peer, tag). So messages of one (peer, tag) are received in the order in which they were sent,
 * and receives complete in the order in which they were posted. Between different peers or tags there is no order; no
 * message waits for the receive of another one, though messages to one peer are sent one at a time. A message that
 * arrives before its receive is kept (max_unexpected_bytes).
 *
 * Progress. Messages are sent, received, and kept while the owner's threads do something else: compute in a callback,
 * wait in an exchange of this or another communicator, or hold a lock of their language. If the transport needs a
 * thread for that (tcp, mpi, host), the endpoint has one, which ends with it. That thread calls nothing of the host
 * except config.allocator and the callbacks of a host communicator.
 *
 * Failure. An endpoint that has failed stays failed: from then on every call except cancel, release, abort and close
 * returns that status with its record, at once; next and wait first return earlier completions. When a call has
 * returned the failure, nothing reads spans of sends any more (over mpi and host copies of them were sent).
 *   PEER_LOST    a rank died, failed, aborted, or left while a request needed it; the record names it, on every rank
 *                that learns of it, even if that rank waited for another one
 *   ABORTED      sluice_messages_abort or sluice_comm_abort on this rank
 *   TIMED_OUT    sluice_messages_wait waited for the communicator's timeout; the record names the straggler
 *   OVER_BUDGET  more than max_unexpected_bytes arrived without a receive, or a message is longer than
 *                max_message_bytes or than its receive allows (the record names the sender), or the allocator's limit
 *                was reached
 *   NO_MEMORY    an allocation failed
 *   INTERNAL     a peer sent something that no endpoint sends
 *   EXTERNAL     the transport's own error, with its text
 * The exchanges of the communicator do not fail with its endpoint, unless they fail for the same reason.
 *
 * Threads. send, receive, cancel, next, wait, release and abort: any thread, at the same time. If two threads wait,
 * each completion is returned to one of them. open and close: one thread, with no other call in progress. After fork
 * the child's endpoint is inert: calls return STATE; abort, release and close do nothing. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/comm/comm.h"

typedef struct sluice_messages_s sluice_messages_t;

enum { SLUICE_MESSAGE_MAX_HEAD_BYTES = 1024, SLUICE_MESSAGE_MAX_SPANS = 1024 };

typedef struct sluice_messages_config_s {
  /* A hash of what all ranks must agree on before the first message (base/hash.h), computed by the owner and compared
   * when the endpoint is opened. */
  uint64_t fingerprint;
  /* Bound on bytes of heads and payloads that are kept, or are arriving, without a receive; 0 = 1 GiB, and never more
   * than this machine's memory. What a correct owner needs follows from how far ahead its peers may send; the bound
   * stops a rank that sends without end. */
  uint64_t max_unexpected_bytes;
  /* Bound on the payload of one arriving message. Memory is allocated from the size that the sender announces, so a
   * faulty sender could ask for all memory. 0 = half of this machine's memory. */
  uint64_t max_message_bytes;
  /* Memory of arriving messages; NULL: the process's allocator. Outlives the endpoint. It is called from the
   * transport's thread or the peer's, without a lock held. */
  sluice_allocator_t* allocator;
} sluice_messages_config_t;

/* Opens this rank's endpoint on `comm`, which is retained and has one endpoint at a time. Collective over `comm`, which
 * must be idle, comm-exclusive, with the same arguments on all ranks: all get an endpoint or none.
 * config: NULL for fingerprint 0 and the defaults. out_messages: new, release with sluice_messages_close.
 * Errors; comm stays usable after the first five: UNSUPPORTED (the transport has no messages: names those that have),
 * STATE (it has an endpoint), MISMATCH (fingerprints differ: names a rank that differs and both values), NO_MEMORY,
 * PEER_REFUSED (names another rank that had one of these), EXTERNAL (the transport's); else errors of exchanges of
 * `comm`. */
sluice_status_t sluice_messages_open(sluice_comm_t* comm, const sluice_messages_config_t* config,
                                     sluice_messages_t** out_messages);

/* Ends the endpoint and its thread, in bounded time (2 s). Not collective. Accepts NULL. Frees every arrival, released
 * or not. A send whose completion has been taken still reaches its peer. Other sends and all receives are given up: if
 * half of a message has been sent, the peer considers this rank lost; otherwise the peer is told that this rank has
 * left, which fails only endpoints that still need this rank. */
void sluice_messages_close(sluice_messages_t* messages);

typedef struct sluice_message_span_s {
  const void* data; /* host memory; may be NULL if bytes is 0 */
  uint64_t bytes;
} sluice_message_span_t;

/* A message to send. */
typedef struct sluice_message_s {
  int32_t peer;        /* [0, W), including this rank */
  int32_t num_spans;   /* [0, SLUICE_MESSAGE_MAX_SPANS] */
  uint64_t tag;        /* any value */
  const void* head;    /* copied */
  uint64_t head_bytes; /* [0, SLUICE_MESSAGE_MAX_HEAD_BYTES] */
  /* The payload: the bytes of the spans in this order, without gaps. The list is copied. The bytes are borrowed, and
   * may not change, until the completion has been taken, the send has been cancelled, or the endpoint has failed. */
  const sluice_message_span_t* spans;
} sluice_message_t;

/* A request of its endpoint; never 0, never reused. */
typedef uint64_t sluice_message_request_t;

/* Starts a send. out_request may be NULL. The completion (SENT) says that the spans belong to the owner again, not that
 * the peer has a receive for the message. Errors: INVALID_ARGUMENT, NO_MEMORY, STATE (fork): nothing is sent, the
 * endpoint is unchanged; else a failure. */
sluice_status_t sluice_messages_send(sluice_messages_t* messages, const sluice_message_t* message, uint64_t user,
                                     sluice_message_request_t* out_request);

/* Posts a receive of one message from `peer` with `tag`. out_request may be NULL. If a peer has left and all its
 * messages are taken, the endpoint fails with PEER_LOST, here or in the next wait. max_bytes: of the payload; a longer
 * one that arrives for this receive fails the endpoint (OVER_BUDGET) before memory is allocated. A message that arrived
 * before this receive is returned even if it is longer, because it passed max_unexpected_bytes. Errors: as
 * sluice_messages_send. */
sluice_status_t sluice_messages_receive_up_to(sluice_messages_t* messages, int32_t peer, uint64_t tag,
                                              uint64_t max_bytes, uint64_t user, sluice_message_request_t* out_request);
/* The same for a payload of any size up to the endpoint's max_message_bytes. */
sluice_status_t sluice_messages_receive(sluice_messages_t* messages, int32_t peer, uint64_t tag, uint64_t user,
                                        sluice_message_request_t* out_request);

/* Cancels a request. Returns 1 if it was cancelled: no completion comes and the spans belong to the owner; a send has
 * sent nothing, a receive has taken no message. Returns 0 if it is too late: the request has completed (its completion
 * is due or was taken), or it is a send that has begun, which will complete; or the endpoint has failed.
 * sluice_messages_abort ends such requests. Never waits. */
int32_t sluice_messages_cancel(sluice_messages_t* messages, sluice_message_request_t request);

/* gives_way 1: from now on, sends of this endpoint let the messages and exchanges of all other endpoints and
 * communicators of this process go first, with little data in flight at a time. 0, the initial value: it shares the
 * links with them. Only tcp supports this; other transports ignore it. */
void sluice_messages_set_gives_way(sluice_messages_t* messages, int32_t gives_way);

enum { SLUICE_MESSAGE_SENT = 1, SLUICE_MESSAGE_RECEIVED = 2 };

/* A received message: memory of the endpoint, which the owner has until sluice_messages_release. */
typedef struct sluice_message_arrival_s sluice_message_arrival_t;

typedef struct sluice_message_completion_s {
  int32_t kind; /* SLUICE_MESSAGE_* */
  int32_t peer;
  uint64_t tag;
  uint64_t user; /* of the request */
  sluice_message_request_t request;
  /* Set for RECEIVED; otherwise 0 and NULL. */
  const void* head;       /* head_bytes, aligned to 64 bytes */
  void* payload;          /* payload_bytes, aligned to 64 bytes, writable; never NULL */
  uint64_t head_bytes;    /* [0, SLUICE_MESSAGE_MAX_HEAD_BYTES] */
  uint64_t payload_bytes; /* sum of the sender's spans */
  sluice_message_arrival_t* arrival;
} sluice_message_completion_t;

/* Returns the next completion, in the order in which requests completed; waits for one until `deadline_ns`
 * (sluice_now_ns clock; 0: does not wait). Errors: TIMED_OUT without a record: there was none, and the endpoint is
 * unchanged; STATE (fork); else a failure of the endpoint. */
sluice_status_t sluice_messages_next(sluice_messages_t* messages, uint64_t deadline_ns,
                                     sluice_message_completion_t* out_completion);

/* The same until the communicator's timeout, for a rank that has nothing else to do: logs a warning every warn_ns that
 * names the awaited rank, and ends if the host wants waits to end (ABORTED). At the timeout the endpoint fails with
 * TIMED_OUT. The record names the straggler: the peer of the oldest request or, if that rank waits too, the rank that
 * it waits for, and so on to a rank that does not wait. Peers that lose this rank afterwards name the same straggler.
 * phase: what is waited for ("an activation of micro-batch 3"); NULL: "a message". Errors: STATE (nothing is
 * outstanding, so nothing can come); else a failure of the endpoint. */
sluice_status_t sluice_messages_wait(sluice_messages_t* messages, const char* phase,
                                     sluice_message_completion_t* out_completion);

/* Releases the memory of a received message for reuse. Accepts NULL. Call once, before close; also after a failure. */
void sluice_messages_release(sluice_messages_t* messages, sluice_message_arrival_t* arrival);

/* Makes every present and later call return ABORTED, in bounded time. The peers' endpoints fail with PEER_LOST that
 * names this rank. May be called repeatedly. Accepts NULL. sluice_comm_abort(comm) has the same effect. */
void sluice_messages_abort(sluice_messages_t* messages);

/* Returns the number of requests, sends and receives, whose completion has not been taken. */
int64_t sluice_messages_outstanding(const sluice_messages_t* messages);
