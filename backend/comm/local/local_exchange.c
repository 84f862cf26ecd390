// SPDX-License-Identifier: Apache-2.0
/* Exchanges between ranks that are threads. See local_comm.c. */
#include "backend/comm/local/local_group.h"

#include <errno.h>
#include <string.h>

#include "backend/base/clock.h"

void sluice_local_leave(local_comm_t* comm, int32_t culprit, int32_t is_failed) {
  local_end_t* ends = comm->group->ends;
  if (ends[comm->base.rank].state == END_LOST) return;
  ends[comm->base.rank].lost_to = ends[culprit].state == END_LOST ? ends[culprit].lost_to : culprit;
  ends[comm->base.rank].state = END_LOST;
  ends[comm->base.rank].is_failed = is_failed;
  pthread_cond_broadcast(&comm->group->changed);
}

/* Orders later work on our stream after the copies that peers have enqueued out of our buffers. */
static sluice_status_t order(local_comm_t* comm, sluice_comm_request_t* request) {
  sluice_status_t status = SLUICE_OK;
  for (int32_t p = 0; p < comm->base.world_size && request->on_device_memory; ++p) {
    if (!request->peers[p].is_unordered) continue;
    local_comm_t* reader = comm->group->ends[p].comm; /* it exists until its copies are ordered */
    void* event = reader->fetched[comm->base.rank];
    sluice_status_t waited = comm->device.wait(comm->device.user, request->stream, event);
    if (waited != SLUICE_OK) {
      comm->device.drain(comm->device.user, request->stream, event);
      status = waited;
    }
    request->peers[p].is_unordered = 0;
    --reader->unordered;
    pthread_cond_broadcast(&comm->group->changed);
  }
  return status;
}

void sluice_local_withdraw(local_comm_t* comm, sluice_comm_request_t* request, int32_t culprit, int32_t is_failed) {
  while (request->readers > 0) pthread_cond_wait(&comm->group->changed, &comm->group->mutex);
  (void)order(comm, request);
  /* Peers that still need data of this request will never get it. */
  if (request->pending > 0) sluice_local_leave(comm, culprit, is_failed);
  request->is_used = 0;
}

static sluice_status_t post(local_comm_t* comm, const sluice_exchange_t* exchange, int32_t on_device_memory,
                            sluice_stream_t stream, sluice_comm_request_t** out_request) {
  sluice_comm_t* base = &comm->base;
  pthread_mutex_lock(&comm->group->mutex);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->requests);
  if (request == NULL) {
    pthread_mutex_unlock(&comm->group->mutex);
    return sluice_comm_fail_third(base);
  }
  request->is_used = 1;
  request->on_device_memory = on_device_memory;
  request->stream = stream;
  request->pending = 0;
  request->number = comm->num_started++;
  for (int32_t p = 0; p < base->world_size; ++p) {
    local_peer_t* peer = &request->peers[p];
    memset(peer, 0, sizeof *peer);
    if (p != base->rank) {
      peer->send = exchange->send[p];
      peer->recv = exchange->recv[p];
      peer->send_bytes = exchange->send_bytes[p];
      peer->recv_bytes = exchange->recv_bytes[p];
    }
    peer->is_sent = peer->send_bytes == 0;
    peer->is_received = peer->recv_bytes == 0;
    request->pending += !peer->is_sent + !peer->is_received;
  }
  pthread_cond_broadcast(&comm->group->changed);
  pthread_mutex_unlock(&comm->group->mutex);
  *out_request = request;
  return SLUICE_OK;
}

sluice_status_t sluice_local_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                            sluice_comm_request_t** out_request) {
  return post(sluice_local_downcast(base), exchange, 0, NULL, out_request);
}

static void note_mismatch(sluice_local_group_t* group, int32_t from, int32_t to, uint64_t sent, uint64_t expected) {
  if (group->mismatch_from >= 0) return;
  group->mismatch_from = from;
  group->mismatch_to = to;
  group->mismatch_sent = sent;
  group->mismatch_expected = expected;
  pthread_cond_broadcast(&group->changed);
}

/* Enqueues the copy of `bytes` that `sender` has posted. */
static sluice_status_t copy_on_device(local_comm_t* comm, const sluice_comm_request_t* request,
                                      const local_comm_t* sender, const void* from, const local_peer_t* ours) {
  const sluice_local_device_t* there = &comm->device;
  SLUICE_TRY(there->wait(there->user, request->stream, sender->ready));
  SLUICE_TRY(there->copy(there->user, request->stream, ours->recv, from, ours->recv_bytes));
  sluice_status_t status = there->record(there->user, comm->fetched[sender->base.rank], request->stream);
  if (status != SLUICE_OK) there->drain(there->user, request->stream, NULL); /* the sender continues without an event */
  return status;
}

/* Copies what peer p has posted for us in the request, if anything. Drops the mutex during the copy. */
static sluice_status_t fetch(local_comm_t* comm, sluice_comm_request_t* request, int32_t p) {
  sluice_local_group_t* group = comm->group;
  int32_t rank = comm->base.rank;
  local_peer_t* ours = &request->peers[p];
  local_comm_t* other = group->ends[p].comm;
  if ((ours->is_sent && ours->is_received) || group->ends[p].state != END_LIVE) return SLUICE_OK;

  sluice_comm_request_t* posted = NULL;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    if (other->requests[i].is_used && other->requests[i].number == request->number) posted = &other->requests[i];
  }
  if (posted == NULL && other->num_started <= request->number) return SLUICE_OK; /* not posted yet */
  /* A peer that has finished this request sent us nothing and expected nothing from us. */
  uint64_t their_send_bytes = posted != NULL ? posted->peers[rank].send_bytes : 0;
  uint64_t their_recv_bytes = posted != NULL ? posted->peers[rank].recv_bytes : 0;
  if (their_send_bytes != ours->recv_bytes) note_mismatch(group, p, rank, their_send_bytes, ours->recv_bytes);
  if (their_recv_bytes != ours->send_bytes) note_mismatch(group, rank, p, ours->send_bytes, their_recv_bytes);
  if (posted != NULL && posted->on_device_memory != request->on_device_memory) note_mismatch(group, p, rank, 0, 0);
  if (group->mismatch_from >= 0 || ours->is_received || posted == NULL) return SLUICE_OK;

  sluice_status_t status = SLUICE_OK;
  ++posted->readers;
  pthread_mutex_unlock(&group->mutex);
  if (request->on_device_memory) {
    status = copy_on_device(comm, request, other, posted->peers[rank].send, ours);
  } else {
    memcpy(ours->recv, posted->peers[rank].send, ours->recv_bytes);
  }
  pthread_mutex_lock(&group->mutex);
  --posted->readers;
  if (status == SLUICE_OK) {
    ours->is_received = 1;
    --request->pending;
    posted->peers[rank].is_sent = 1;
    --posted->pending;
    posted->peers[rank].is_unordered = request->on_device_memory;
    comm->unordered += request->on_device_memory;
  }
  pthread_cond_broadcast(&group->changed);
  return status;
}

/* Fetches everything that was posted for this rank's requests. */
static sluice_status_t fetch_all(local_comm_t* comm) {
  int32_t world_size = comm->base.world_size;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    for (int32_t step = 1; step < world_size && comm->requests[i].is_used; ++step) {
      SLUICE_TRY(fetch(comm, &comm->requests[i],
                       (comm->base.rank + step) % world_size)); /* so that not all ranks begin with rank 0 */
    }
  }
  return SLUICE_OK;
}

/* Rank p takes no further part, so the group is lost. */
static sluice_status_t fail_lost(const local_comm_t* comm, int32_t p, int32_t* out_culprit, int32_t* out_is_failed) {
  const local_end_t* end = &comm->group->ends[p];
  int32_t rank = comm->base.rank;
  int32_t culprit = end->lost_to;
  *out_culprit = culprit;
  *out_is_failed = end->is_failed || culprit == p;
  if (culprit == rank) {
    return SLUICE_FAIL_PEER(SLUICE_E_PEER_LOST, rank, p, "rank %d: rank %d gave up waiting for this rank; see its log",
                            rank, p);
  }
  return SLUICE_FAIL_PEER(SLUICE_E_PEER_LOST, rank, culprit,
                          "rank %d: rank %d left in the middle of an exchange: it destroyed its communicator or "
                          "gave up waiting; see its log for the reason",
                          rank, culprit);
}

/* Returns OK, or why the request can never complete or need not, and which rank is at fault. */
static sluice_status_t find_failure(local_comm_t* comm, const sluice_comm_request_t* request, int32_t* out_culprit,
                                    int32_t* out_is_failed) {
  const sluice_local_group_t* group = comm->group;
  int32_t rank = comm->base.rank;
  *out_culprit = rank;
  *out_is_failed = 1;
  if (comm->is_aborted) {
    return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, rank, -1, "rank %d: this communicator was aborted", rank);
  }
  if (group->mismatch_from >= 0) {
    int32_t from = group->mismatch_from;
    int32_t to = group->mismatch_to;
    if (group->mismatch_sent == group->mismatch_expected) {
      return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, rank, from == rank ? to : from,
                              "ranks %d and %d are in the same exchange, one with device memory and one with host "
                              "memory: use contexts of one device type on all ranks of a group",
                              from, to);
    }
    return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, rank, from == rank ? to : from,
                            "rank %d sends %llu bytes to rank %d, which expects %llu: the ranks disagree on their "
                            "counts; please report it",
                            from, (unsigned long long)group->mismatch_sent, to,
                            (unsigned long long)group->mismatch_expected);
  }
  if (group->aborted_by >= 0) {
    *out_culprit = group->aborted_by;
    return SLUICE_FAIL_PEER(SLUICE_E_PEER_LOST, rank, group->aborted_by,
                            "rank %d: rank %d aborted the group; see its log for the reason", rank, group->aborted_by);
  }
  for (int32_t p = 0; p < comm->base.world_size; ++p) {
    int is_needed = !request->peers[p].is_sent || !request->peers[p].is_received;
    if (is_needed && group->ends[p].state == END_LOST) return fail_lost(comm, p, out_culprit, out_is_failed);
  }
  /* A rank that failed also ends waits for other ranks, which may never answer. */
  for (int32_t p = 0; p < comm->base.world_size; ++p) {
    if (p != rank && group->ends[p].state == END_LOST && group->ends[p].is_failed) {
      return fail_lost(comm, p, out_culprit, out_is_failed);
    }
  }
  return SLUICE_OK;
}

static int32_t find_missing(const local_comm_t* comm, const sluice_comm_request_t* request) {
  int32_t unfetched = -1;
  for (int32_t p = comm->base.world_size - 1; p >= 0; --p) {
    if (!request->peers[p].is_received) return p;
    if (!request->peers[p].is_sent) unfetched = p;
  }
  return unfetched;
}

sluice_status_t sluice_local_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                           int32_t* out_peer) {
  local_comm_t* comm = sluice_local_downcast(base);
  sluice_status_t status = SLUICE_OK;
  int32_t culprit = base->rank;
  int32_t is_failed = 1;
  pthread_mutex_lock(&comm->group->mutex);
  for (;;) {
    status = fetch_all(comm);
    if (status == SLUICE_OK) status = order(comm, request);
    if (status != SLUICE_OK) break; /* of the device */
    if (request->pending == 0) break;
    status = find_failure(comm, request, &culprit, &is_failed);
    if (status != SLUICE_OK) break;
    if (sluice_cond_wait_until(&comm->group->changed, &comm->group->mutex, deadline_ns) == ETIMEDOUT) {
      if (out_peer != NULL) *out_peer = find_missing(comm, request);
      status = SLUICE_E_TIMED_OUT;
      break;
    }
  }
  sluice_error_info_t why; /* saved, because withdraw may overwrite it */
  if (status != SLUICE_OK && status != SLUICE_E_TIMED_OUT) sluice_error_capture(&why);
  if (status != SLUICE_E_TIMED_OUT) sluice_local_withdraw(comm, request, culprit, is_failed);
  pthread_mutex_unlock(&comm->group->mutex);
  return status == SLUICE_OK || status == SLUICE_E_TIMED_OUT ? status : sluice_error_adopt(&why);
}

void sluice_local_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  local_comm_t* comm = sluice_local_downcast(base);
  pthread_mutex_lock(&comm->group->mutex);
  int32_t missing = find_missing(comm, request);
  sluice_local_withdraw(comm, request, missing >= 0 ? missing : base->rank, 0);
  pthread_mutex_unlock(&comm->group->mutex);
}

sluice_status_t sluice_local_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                              sluice_stream_t stream) {
  local_comm_t* comm = sluice_local_downcast(base);
  sluice_comm_request_t* request = NULL;
  if (comm->device.copy == NULL) {
    return SLUICE_FAIL_PEER(SLUICE_E_UNSUPPORTED, base->rank, -1,
                            "rank %d: this local communicator has no device yet: create a CUDA context on it first",
                            base->rank);
  }
  SLUICE_TRY(comm->device.record(comm->device.user, comm->ready, stream));
  SLUICE_TRY(post(comm, exchange, 1, stream, &request));
  return sluice_comm_exchange_wait(base, request, "the other ranks to enqueue an exchange");
}
