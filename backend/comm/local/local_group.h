// SPDX-License-Identifier: Apache-2.0
/* A group of ranks that are threads: the state of the group, its ends and their requests.
 *
 *   local_comm.c      groups, creating and destroying a rank's communicator, devices, notes
 *   local_exchange.c  exchanges
 *   local_messages.c  messages */
#pragma once

#include <pthread.h>

#include "backend/comm/comm.h"
#include "backend/comm/local/local_device.h"
#include "backend/comm/requests.h"

typedef struct local_comm_s local_comm_t;

typedef struct local_peer_s { /* one peer's part of a request */
  const void* send;
  void* recv;
  uint64_t send_bytes;
  uint64_t recv_bytes;
  int32_t is_sent; /* the peer has fetched it, or there is nothing to send */
  int32_t is_received;
  int32_t is_unordered; /* the peer's copy is enqueued, and our stream does not wait for it yet */
} local_peer_t;

struct sluice_comm_request_s {
  int32_t is_used;
  int32_t readers;          /* peers that are copying out of our send buffers */
  int32_t pending;          /* entries of peers[] not yet sent plus entries not yet received */
  int32_t on_device_memory; /* device memory, on `stream` */
  sluice_stream_t stream;
  uint64_t number;     /* the same on all ranks; requests are matched by it */
  local_peer_t* peers; /* [W] */
};

enum { END_ABSENT = 0, END_LIVE, END_LOST };

typedef struct local_note_s {
  char key[32];
  char value[192];
} local_note_t;

typedef struct local_end_s { /* the group's view of one rank */
  int32_t state;
  int32_t lost_to;            /* END_LOST: the rank at fault: itself, or the rank for which its wait failed */
  int32_t is_failed;          /* END_LOST by a failure: all ranks may stop waiting, for any rank */
  local_comm_t* comm;         /* until it is destroyed */
  struct sluice_wire_s* wire; /* while its messages are open */
  local_note_t note;
} local_end_t;

struct sluice_local_group_s {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pid_t pid;
  int32_t references;
  int32_t world_size;
  int32_t aborted_by; /* the first rank that aborted, or -1 */
  /* The first pair of ranks whose byte counts differ. This is an error of the caller that ends the group. */
  int32_t mismatch_from; /* or -1 */
  int32_t mismatch_to;
  uint64_t mismatch_sent;
  uint64_t mismatch_expected;
  local_end_t ends[]; /* [W] */
};

struct local_comm_s {
  sluice_comm_t base;
  sluice_local_group_t* group;
  int32_t is_aborted;
  uint64_t num_started;
  sluice_local_device_t device; /* copy is NULL: none */
  void* ready;                  /* event: the rows of the current exchange are ready */
  void** fetched;               /* [W] events: our copy of that rank's rows is done */
  int32_t unordered;            /* number of copies that their senders' streams do not wait for yet */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
  local_peer_t peers[]; /* [SLUICE_MAX_IN_FLIGHT * W] */
};

static inline local_comm_t* sluice_local_downcast(sluice_comm_t* comm) { return (local_comm_t*)comm; }

/* local_exchange.c. Call these two with the group's mutex held. */

/* Announces once that this rank takes no further part, and which rank is at fault: a rank that gives up because of
 * another one passes the blame on. A rank that leaves with nothing outstanding is no failure. A rank whose deadline has
 * passed is no failure yet: the other ranks reach their own deadlines, and name the straggler themselves. */
void sluice_local_leave(local_comm_t* comm, int32_t culprit, int32_t is_failed);
/* Withdraws a request: when no peer copies out of it any more, its buffers belong to the caller again. */
void sluice_local_withdraw(local_comm_t* comm, sluice_comm_request_t* request, int32_t culprit, int32_t is_failed);

sluice_status_t sluice_local_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                            sluice_comm_request_t** out_request);
sluice_status_t sluice_local_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                           int32_t* out_peer);
void sluice_local_abandon(sluice_comm_t* base, sluice_comm_request_t* request);
sluice_status_t sluice_local_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                              sluice_stream_t stream);

/* local_messages.c */
sluice_status_t sluice_local_messages_open(sluice_comm_t* base, struct sluice_messages_s* messages,
                                           struct sluice_wire_s** out_wire);
