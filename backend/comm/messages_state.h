// SPDX-License-Identifier: Apache-2.0
/* The state of an endpoint. Private to backend/comm.
 *
 *   messages_open.c      opens and closes endpoints
 *   messages_requests.c  sends and receives, and their cancellation
 *   messages_arrivals.c  memory of arriving messages, and their matching
 *   messages_wait.c      completions, deadlines, stragglers
 *   messages_failure.c   failures, and what peers report about themselves */
#pragma once

#include <pthread.h>

#include "backend/comm/messages.h"
#include "backend/comm/messages_wire.h"

enum { SLUICE_FEW_SPANS = 8, SLUICE_MAX_FREE_ARRIVALS = 64 };

struct sluice_message_arrival_s {
  sluice_link_t place; /* in a peer's unexpected list or in the free list; else unlinked */
  sluice_link_t all;
  uint64_t capacity; /* of the payload */
  uint64_t tag;
  uint64_t payload_bytes;
  uint32_t head_bytes;
  int32_t peer;
  int32_t is_counted; /* in unexpected_bytes */
};

/* A request. A receive is in its peer's list and a send in the list of sends; after that both are in the list of
 * completed ones. */
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
  sluice_link_t receives;   /* posted, the oldest first; none matches an unexpected message */
  sluice_link_t unexpected; /* arrivals without a receive, oldest first */
  int64_t num_sending;
  int32_t has_left;
  int32_t waits_for;        /* the rank that the peer reports to wait for, or -1 */
  sluice_outgoing_t* waits; /* this rank's frame to the peer about the rank that it waits for */
  sluice_outgoing_t* goes_on;
  int32_t waits_is_out; /* the wire has that frame */
  int32_t goes_on_is_out;
} sluice_message_peer_t;

struct sluice_messages_s {
  sluice_comm_t* comm;
  sluice_wire_t* wire; /* NULL with one rank */
  sluice_allocator_t* memory;
  uint64_t bytes; /* of this block */
  uint64_t max_unexpected_bytes, max_message_bytes;
  _Atomic int64_t outstanding;

  pthread_mutex_t mutex; /* guards the following; no function is called with it held */
  pthread_cond_t changed;
  uint64_t last_number;
  uint64_t unexpected_bytes;
  uint64_t arrival_bytes;      /* of all arrivals in use: their capacities */
  uint64_t peak_arrival_bytes; /* unused blocks are kept up to this many */
  uint64_t free_arrival_bytes;
  int32_t num_free_arrivals;
  sluice_link_t free_arrivals;
  sluice_link_t all_arrivals;
  sluice_link_t sends;
  sluice_link_t completed;
  sluice_link_t free_operations;
  sluice_message_operation_t* all_operations;
  int32_t is_failing; /* `why` is set, and the wire is being told */
  int32_t has_failed; /* the wire has been told: waits return */
  sluice_error_info_t why;
  sluice_message_peer_t peers[]; /* [W] */
};

/* Call with the mutex held. Returns the message that a new receive gets, or NULL. */
sluice_message_arrival_t* sluice_messages_take_unexpected(sluice_messages_t* messages, int32_t peer, uint64_t tag);
/* Call with the mutex held, when the operation has completed. */
void sluice_messages_complete(sluice_messages_t* messages, sluice_message_operation_t* operation);
/* Fails the endpoint with the record `why` instead of this thread's. */
void sluice_messages_fail_with(sluice_messages_t* messages, const sluice_error_info_t* why, int32_t culprit);
/* Returns OK, or the failure, whose record this thread adopts. */
sluice_status_t sluice_messages_check(sluice_messages_t* messages);
/* Call with the mutex held. Returns a rank that has left although a request needs it; -1: none. */
int32_t sluice_messages_find_left(const sluice_messages_t* messages);
/* Call with the mutex held. Keeps the operation for another request. */
void sluice_messages_recycle(sluice_messages_t* messages, sluice_message_operation_t* operation);
/* Call when no other thread uses the endpoint. */
void sluice_messages_free_arrivals(sluice_messages_t* messages);
void sluice_messages_free_operations(sluice_messages_t* messages);
