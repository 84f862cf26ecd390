// SPDX-License-Identifier: Apache-2.0
/* What an endpoint holds. Private to backend/comm.
 *
 *   messages_open.c      endpoints come and go
 *   messages_requests.c  sends and receives, taken back too
 *   messages_arrivals.c  memory of arriving messages, and who gets them
 *   messages_wait.c      completions, deadlines, stragglers
 *   messages_failure.c   failures, and what peers say of themselves */
#ifndef SLUICE_BACKEND_COMM_MESSAGES_STATE_H_
#define SLUICE_BACKEND_COMM_MESSAGES_STATE_H_

#include <pthread.h>

#include "backend/comm/messages.h"
#include "backend/comm/messages_list.h"
#include "backend/comm/messages_wire.h"

enum { SLUICE_FEW_SPANS = 8, SLUICE_MAX_FREE_ARRIVALS = 64 };

struct sluice_message_arrival_s {
  sluice_link_t place; /* in a peer's unexpected ones, or in the free ones; else alone */
  sluice_link_t all;
  uint64_t capacity; /* of the payload */
  uint64_t tag;
  uint64_t payload_bytes;
  uint32_t head_bytes;
  int32_t peer;
  int32_t is_counted; /* in unexpected_bytes */
};

/* A request: a receive's place is in its peer's list, a send's among the sends, then both among the completed. */
typedef struct sluice_message_operation_s {
  sluice_link_t place;
  struct sluice_message_operation_s* next_of_all;
  int32_t kind; /* of its completion */
  int32_t peer;
  uint64_t tag;
  uint64_t user;
  uint64_t number;
  uint64_t max_bytes;                /* of a receive */
  sluice_message_arrival_t* arrival; /* of a completed receive */
  sluice_message_span_t few[SLUICE_FEW_SPANS];
  sluice_message_span_t* many; /* [capacity], kept for the next send */
  uint64_t capacity;
  sluice_outgoing_t outgoing; /* of a send */
} sluice_message_operation_t;

typedef struct sluice_message_peer_s {
  sluice_link_t receives;   /* posted, the oldest first; no unexpected message is for them */
  sluice_link_t unexpected; /* arrivals without a receive, the oldest first */
  int64_t num_sending;
  int32_t has_left;
  int32_t waits_for;        /* the rank that it says it waits for, or -1 */
  sluice_outgoing_t* waits; /* this rank's word to it that it waits, and that it does not */
  sluice_outgoing_t* goes_on;
  int32_t waits_is_out; /* with the wire */
  int32_t goes_on_is_out;
} sluice_message_peer_t;

struct sluice_messages_s {
  sluice_comm_t* comm;
  sluice_wire_t* wire; /* NULL: one rank */
  sluice_allocator_t* memory;
  uint64_t bytes; /* of this block */
  uint64_t max_unexpected_bytes, max_message_bytes;
  _Atomic int64_t outstanding;

  pthread_mutex_t mutex; /* guards what follows; nothing is called with it */
  pthread_cond_t changed;
  uint64_t last_number;
  uint64_t unexpected_bytes;
  uint64_t arrival_bytes;      /* of all arrivals in use: their capacities */
  uint64_t peak_arrival_bytes; /* free ones are kept up to here */
  uint64_t free_arrival_bytes;
  int32_t num_free_arrivals;
  sluice_link_t free_arrivals;
  sluice_link_t all_arrivals;
  sluice_link_t sends;
  sluice_link_t completed;
  sluice_link_t free_operations;
  sluice_message_operation_t* all_operations;
  int32_t is_failing; /* `why` is set, and the wire is being told */
  int32_t has_failed; /* and has been: waits return */
  sluice_error_info_t why;
  sluice_message_peer_t peers[]; /* [W] */
};

/* Under the mutex: the message that a new receive gets, or NULL. */
sluice_message_arrival_t* sluice_messages_take_unexpected(sluice_messages_t* messages, int32_t peer, uint64_t tag);
/* Under the mutex: it has completed. */
void sluice_messages_complete(sluice_messages_t* messages, sluice_message_operation_t* operation);
/* Fails with a record of its own, which this thread need not have. */
void sluice_messages_fail_with(sluice_messages_t* messages, const sluice_error_info_t* why, int32_t culprit);
/* OK, or this thread adopts the failure. */
sluice_status_t sluice_messages_check(sluice_messages_t* messages);
/* Under the mutex: a rank that has left and that a request needs; -1: none. */
int32_t sluice_messages_find_left(const sluice_messages_t* messages);
/* Under the mutex: the operation serves the next request. */
void sluice_messages_recycle(sluice_messages_t* messages, sluice_message_operation_t* operation);
/* When nobody else has the endpoint any more. */
void sluice_messages_free_arrivals(sluice_messages_t* messages);
void sluice_messages_free_operations(sluice_messages_t* messages);

#endif /* SLUICE_BACKEND_COMM_MESSAGES_STATE_H_ */
