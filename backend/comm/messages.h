// SPDX-License-Identifier: Apache-2.0
/* Messages between two ranks, beside the exchanges of a communicator [AxoNN, section III-B: an asynchronous,
 * message-driven pipeline].
 *
 * An *endpoint* is one rank's end of the messages among all ranks of a communicator. It is opened collectively, so that
 * a communicator that never sends a message pays nothing. A *message* has a peer, a 64-bit tag, a small head, and a
 * payload gathered from spans of host memory. Head and payload are bytes: byte order and meaning are the owner's. It
 * travels as one message; its sizes go ahead of it in a frame of fixed size, so the receiver need not know them.
 *
 * Sends and posted receives are *requests*: they return at once, and each that succeeds yields one *completion* with
 * the owner's word `user`. One call waits for the next completion of any request. Any number may be outstanding.
 *
 * Matching. A receive takes the oldest message of its (peer, tag) that no receive has taken; a message goes to the
 * oldest receive of its (peer, tag). So messages of one (peer, tag) are received in the order in which they were sent,
 * and receives complete in the order in which they were posted. Between different peers or tags there is no order; no
 * message waits for the receive of another one, though bytes to one peer travel one message after the other. A message
 * that arrives before its receive is kept (max_unexpected_bytes).
 *
 * Progress. Messages are sent, received, and kept while the owner's threads do something else: compute in a callback,
 * wait in an exchange of this or another communicator, or hold a lock of their language. Where the transport needs a
 * thread for that (tcp, mpi, host) the endpoint has one, which ends with it. That thread calls nothing of the host, but
 * config.allocator and what a host communicator's own callbacks are.
 *
 * Failure. An endpoint that has failed stays failed: from then on every call but cancel, release, abort and close
 * returns that status with its record, at once; next and wait first give what had completed. When a call has returned
 * the failure, nothing reads spans of sends any more (over mpi and host copies of them were sent).
 *   PEER_LOST    a rank died, failed, aborted, or left while a request needed it; the record names it, on every rank
 *                that hears of it, also where another rank was waited for
 *   ABORTED      sluice_messages_abort or sluice_comm_abort on this rank
 *   TIMED_OUT    sluice_messages_wait waited for the communicator's timeout; the record names the straggler
 *   OVER_BUDGET  more than max_unexpected_bytes came unasked for, or a message is longer than max_message_bytes or than
 *                its receive allows; the record names their sender, or the allocator's limit was met, as does NO_MEMORY
 *   INTERNAL     a peer sent what no endpoint sends
 *   EXTERNAL      the transport's own error, with its text
 * The exchanges of the communicator do not fail with its endpoint, except by what made it fail.
 *
 * Threads. send, receive, cancel, next, wait, release and abort: any thread, at the same time. Who waits in two threads
 * gets each completion once. open and close: one thread, with no other call under way. After fork the child's endpoint
 * is inert: calls return STATE; abort, release and close do nothing. */
#ifndef SLUICE_BACKEND_COMM_MESSAGES_H_
#define SLUICE_BACKEND_COMM_MESSAGES_H_

#include "backend/base/alloc.h"
#include "backend/comm/comm.h"

typedef struct sluice_messages_s sluice_messages_t;

enum { SLUICE_MESSAGE_MAX_HEAD_BYTES = 1024, SLUICE_MESSAGE_MAX_SPANS = 1024 };

typedef struct sluice_messages_config_s {
  /* What all ranks must agree on before the first message, hashed by the owner (base/hash.h): compared when the
   * endpoint is opened. */
  uint64_t fingerprint;
  /* Bytes of heads and payloads that are kept, or are arriving, without a receive; 0 = 1 GiB, and never more than this
   * machine's memory. What a correct owner
   * needs follows from what its peers may send ahead: this stops a rank that sends without end. */
  uint64_t max_unexpected_bytes;
  /* Of the payload of one message that arrives: memory is asked for by what its sender says ahead of it, so a sender
   * that has gone wrong could ask for all there is. 0 = half of this machine's memory. */
  uint64_t max_message_bytes;
  /* Memory of arriving messages; NULL: the process's. Outlives the endpoint. It is called from the transport's thread
   * or from the peer's, with nothing locked. */
  sluice_allocator_t* allocator;
} sluice_messages_config_t;

/* Opens this rank's endpoint on `comm`, which is retained and has one endpoint at a time. Collective over `comm`, which
 * must be idle, comm-exclusive, and alike on all ranks: all get an endpoint or none.
 * config: NULL for fingerprint 0 and the defaults. out_messages: new, sluice_messages_close.
 * Errors; comm stays usable after the first five: UNSUPPORTED (the transport has no messages: says which have), STATE
 * (it has an endpoint), MISMATCH (fingerprints differ: names a rank that differs and both values), NO_MEMORY,
 * PEER_REFUSED (another rank had one of these: named), EXTERNAL (the transport's); else what the exchanges of `comm`
 * return. */
sluice_status_t sluice_messages_open(sluice_comm_t* comm, const sluice_messages_config_t* config,
                                     sluice_messages_t** out_messages);

/* Ends the endpoint and its thread, in bounded time (2 s). Not collective. Accepts NULL. Frees every arrival, released
 * or not. A send whose completion has been taken still reaches its peer. Other sends and all receives are given up:
 * where half of a message has gone out, the peer takes this rank for lost, else it hears that this rank has left, which
 * fails only those that still need it. */
void sluice_messages_close(sluice_messages_t* messages);

typedef struct sluice_message_span_s {
  const void* data; /* host memory; may be NULL where bytes is 0 */
  uint64_t bytes;
} sluice_message_span_t;

/* What is sent. */
typedef struct sluice_message_s {
  int32_t peer;        /* [0, W); the own rank too */
  int32_t num_spans;   /* [0, SLUICE_MESSAGE_MAX_SPANS] */
  uint64_t tag;        /* any value */
  const void* head;    /* copied */
  uint64_t head_bytes; /* [0, SLUICE_MESSAGE_MAX_HEAD_BYTES] */
  /* The payload: their bytes in this order, without gaps. The list is copied; what it points to is borrowed, and may
   * not change, until the completion has been taken, the send has been cancelled, or the endpoint has failed. */
  const sluice_message_span_t* spans;
} sluice_message_t;

/* Names a request of its endpoint; never 0, never used twice. */
typedef uint64_t sluice_message_request_t;

/* Starts to send. out_request may be NULL. The completion (SENT) says that the spans are the owner's again, not that
 * the peer has a receive for it.
 * Errors: INVALID_ARGUMENT, NO_MEMORY, STATE (fork): nothing is sent, the endpoint is as it was; else a failure. */
sluice_status_t sluice_messages_send(sluice_messages_t* messages, const sluice_message_t* message, uint64_t user,
                                     sluice_message_request_t* out_request);

/* Posts a receive of one message from `peer` with `tag`. out_request may be NULL. A peer that has left and whose
 * messages are all taken makes the endpoint fail with PEER_LOST, here or in the next wait. max_bytes: of the payload; a
 * longer one that arrives for this receive ends the endpoint (OVER_BUDGET) before memory is asked for. One that had
 * arrived before is given all the same: it has met max_unexpected_bytes. Errors: as sluice_messages_send. */
sluice_status_t sluice_messages_receive_up_to(sluice_messages_t* messages, int32_t peer, uint64_t tag,
                                              uint64_t max_bytes, uint64_t user, sluice_message_request_t* out_request);
/* The same, of a payload of any size up to the endpoint's max_message_bytes. */
sluice_status_t sluice_messages_receive(sluice_messages_t* messages, int32_t peer, uint64_t tag, uint64_t user,
                                        sluice_message_request_t* out_request);

/* Takes a request back. 1: it is as if it had never been made: no completion comes, spans are the owner's; a send has
 * sent nothing, a receive has taken no message. 0: too late: it has completed, its completion comes or has come, or it
 * is a send of which bytes have gone out, which completes; or the endpoint has failed. To end those: sluice_messages_
 * abort. Never waits. */
int32_t sluice_messages_cancel(sluice_messages_t* messages, sluice_message_request_t request);

/* gives_way 1: what is sent can wait. From now on it lets the messages and exchanges of all other endpoints and
 * communicators of this process go first, and little of it is under way at a time. 0, as an endpoint begins: it shares
 * the links with them. Where transports have no say (all but tcp) nothing changes. */
void sluice_messages_set_gives_way(sluice_messages_t* messages, int32_t gives_way);

enum { SLUICE_MESSAGE_SENT = 1, SLUICE_MESSAGE_RECEIVED = 2 };

/* A received message: memory of the endpoint, the owner's until sluice_messages_release. */
typedef struct sluice_message_arrival_s sluice_message_arrival_t;

typedef struct sluice_message_completion_s {
  int32_t kind; /* SLUICE_MESSAGE_* */
  int32_t peer;
  uint64_t tag;
  uint64_t user; /* of the request */
  sluice_message_request_t request;
  /* RECEIVED; else 0 and NULL. */
  const void* head;       /* head_bytes, aligned to 64 bytes */
  void* payload;          /* payload_bytes, aligned to 64 bytes, the owner may write; never NULL */
  uint64_t head_bytes;    /* [0, SLUICE_MESSAGE_MAX_HEAD_BYTES] */
  uint64_t payload_bytes; /* sum of the sender's spans */
  sluice_message_arrival_t* arrival;
} sluice_message_completion_t;

/* The next completion, in the order in which requests completed; waits for one until `deadline_ns` (sluice_now_ns
 * clock; 0: only looks). Errors: TIMED_OUT without a record: none came, the endpoint goes on; STATE (fork); else a
 * failure of the endpoint. */
sluice_status_t sluice_messages_next(sluice_messages_t* messages, uint64_t deadline_ns,
                                     sluice_message_completion_t* out_completion);

/* The same until the communicator's timeout, for a rank that has nothing else to do: warns every warn_ns with the rank
 * it waits for, ends when the host wants waits ended (ABORTED). At the timeout the endpoint fails with TIMED_OUT. The
 * record names the straggler: the peer of the oldest request; or, where that rank has been waiting too, the one it
 * waits for, and so on to one that is not waiting. Peers that see this rank go see the same straggler lost. phase: what
 * is waited for ("an activation of micro-batch 3"); NULL: "a message". Errors: STATE (nothing is outstanding, so
 * nothing can come); else a failure of the endpoint. */
sluice_status_t sluice_messages_wait(sluice_messages_t* messages, const char* phase,
                                     sluice_message_completion_t* out_completion);

/* Gives the memory of a received message back, for messages to come. Accepts NULL. Before close, once; also after a
 * failure. */
void sluice_messages_release(sluice_messages_t* messages, sluice_message_arrival_t* arrival);

/* Makes every present and later call return ABORTED, in bounded time. The peers' endpoints fail with PEER_LOST that
 * names this rank. Repeatable. Accepts NULL. sluice_comm_abort(comm) does it too. */
void sluice_messages_abort(sluice_messages_t* messages);

/* Requests whose completion has not been taken: sends and receives together. */
int64_t sluice_messages_outstanding(const sluice_messages_t* messages);

#endif /* SLUICE_BACKEND_COMM_MESSAGES_H_ */
