// SPDX-License-Identifier: Apache-2.0
/* A group of ranks that are threads: what it, its ends and their requests hold, and the exchanges between them.
 *
 * local_comm.c      groups, making and ending a rank's communicator, devices, notes
 * local_exchange.c  exchanges
 * local_messages.c  messages */
#ifndef SLUICE_BACKEND_COMM_LOCAL_LOCAL_GROUP_H_
#define SLUICE_BACKEND_COMM_LOCAL_LOCAL_GROUP_H_

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
  int32_t readers;          /* peers copying out of our send buffers right now */
  int32_t pending;          /* entries of peers[] not yet sent plus not yet received */
  int32_t on_device_memory; /* memory of a device, on `stream` */
  sluice_stream_t stream;
  uint64_t number;     /* the same on all ranks: requests are matched by it */
  local_peer_t* peers; /* [W] */
};

enum { END_ABSENT = 0, END_LIVE, END_LOST };

typedef struct local_note_s {
  char key[32];
  char value[192];
} local_note_t;

typedef struct local_end_s { /* the group's view of one rank */
  int32_t state;
  int32_t lost_to;            /* END_LOST: the rank at fault, itself or the one it waited for in vain */
  int32_t is_failed;          /* END_LOST by a failure: whoever waits, for any rank, need not wait on */
  local_comm_t* comm;         /* while it has not been destroyed */
  struct sluice_wire_s* wire; /* while it has messages open */
  local_note_t note;
} local_end_t;

struct sluice_local_group_s {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pid_t pid;
  int32_t references;
  int32_t world_size;
  int32_t aborted_by; /* first rank that aborted, or -1 */
  /* The first pair of ranks whose byte counts differ: an error of the caller that ends the group. */
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
  sluice_local_device_t device; /* copy NULL: none */
  void* ready;                  /* event: the rows of the exchange being enqueued are there */
  void** fetched;               /* [W] events: our copy of that rank's rows */
  int32_t unordered;            /* of those, copies that their senders' streams do not wait for yet */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
  local_peer_t peers[]; /* [SLUICE_MAX_IN_FLIGHT * W] */
};

static inline local_comm_t* sluice_local_downcast(sluice_comm_t* comm) { return (local_comm_t*)comm; }

/* local_exchange.c; these two with the group's mutex held */

/* Says once that this rank takes no further part, and whose fault that is: a rank that gives up because of another
 * passes the blame on. A rank that leaves when it is through is no failure, and one whose deadline has passed is none
 * yet: the others reach theirs, and name the straggler themselves. */
void sluice_local_leave(local_comm_t* comm, int32_t culprit, int32_t is_failed);
/* Takes a request back: once nobody copies out of it, its buffers are the caller's again. */
void sluice_local_withdraw(local_comm_t* comm, sluice_comm_request_t* request, int32_t culprit, int32_t is_failed);

sluice_status_t sluice_local_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                            sluice_comm_request_t** out_request);
sluice_status_t sluice_local_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                           int32_t* out_peer);
void sluice_local_abandon(sluice_comm_t* base, sluice_comm_request_t* request);
sluice_status_t sluice_local_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                              sluice_stream_t stream);
sluice_status_t sluice_local_poll(sluice_comm_t* base);

/* local_messages.c */
sluice_status_t sluice_local_messages_open(sluice_comm_t* base, struct sluice_messages_s* messages,
                                           struct sluice_wire_s** out_wire);

#endif /* SLUICE_BACKEND_COMM_LOCAL_LOCAL_GROUP_H_ */
