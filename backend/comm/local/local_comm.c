/* The ranks are threads of one process: the smallest complete transport, and the one to copy for a new one.
 *
 * A rank posts its request in the group; a waiting rank copies what its peers have posted for the same request number
 * straight out of their send buffers. So only a rank's own thread writes its memory, and a request is complete when
 * everything has come in and everything has been fetched. A wait serves both requests in flight: two ranks may wait for
 * theirs in different orders.
 *
 * Everything here is guarded by the group's mutex, except the bytes being copied: `readers` keeps the request they
 * belong to alive meanwhile.
 *
 * Memory of a device goes the same way in the order of streams (local_far.h): a copy is then enqueued instead of done,
 * and exchange_enqueue returns when everything of this rank's has been. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/comm.h"
#include "backend/comm/local/local_far.h"
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
  int32_t readers; /* peers copying out of our send buffers right now */
  int32_t pending; /* entries of peers[] not yet sent plus not yet received */
  int32_t is_far;  /* memory of a device, on `stream` */
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
  int32_t lost_to;    /* END_LOST: the rank at fault, itself or the one it waited for in vain */
  int32_t is_failed;  /* END_LOST by a failure: whoever waits, for any rank, need not wait on */
  local_comm_t* comm; /* while it has not been destroyed */
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
  sluice_local_far_t far; /* copy NULL: none */
  void* ready;            /* event: the rows of the exchange being enqueued are there */
  void** fetched;         /* [W] events: our copy of that rank's rows */
  int32_t unordered;      /* of those, copies that their senders' streams do not wait for yet */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
  local_peer_t peers[]; /* [SLUICE_MAX_IN_FLIGHT * W] */
};

static const sluice_comm_vtable_t local_comm_vtable;

static local_comm_t* downcast(sluice_comm_t* comm) { return (local_comm_t*)comm; }

/* ---- group ----------------------------------------------------------------------------------------------------- */

static uint64_t group_bytes(int32_t world_size) {
  return sizeof(sluice_local_group_t) + (uint64_t)world_size * sizeof(local_end_t);
}

sluice_status_t sluice_local_group_create(int32_t world_size, sluice_local_group_t** out_group) {
  if (out_group == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_local_group_create: out_group is NULL");
  *out_group = NULL;
  if (world_size < 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_local_group_create: world_size is %d, must be at least 1",
                       world_size);
  }
  sluice_local_group_t* group = sluice_alloc_zeroed(sluice_process_allocator(), group_bytes(world_size), "local group");
  if (group == NULL) return SLUICE_E_NO_MEMORY;
  pthread_mutex_init(&group->mutex, NULL);
  sluice_cond_init(&group->changed);
  group->pid = getpid();
  group->references = 1;
  group->world_size = world_size;
  group->aborted_by = -1;
  group->mismatch_from = -1;
  *out_group = group;
  return SLUICE_OK;
}

void sluice_local_group_destroy(sluice_local_group_t* group) {
  if (group == NULL || group->pid != getpid()) return;
  pthread_mutex_lock(&group->mutex);
  int32_t left = --group->references;
  pthread_mutex_unlock(&group->mutex);
  if (left > 0) return;
  pthread_cond_destroy(&group->changed);
  pthread_mutex_destroy(&group->mutex);
  sluice_free(sluice_process_allocator(), group, group_bytes(group->world_size));
}

/* ---- life of an end -------------------------------------------------------------------------------------------- */

static uint64_t comm_bytes(int32_t world_size) {
  return sizeof(local_comm_t) + SLUICE_MAX_IN_FLIGHT * (uint64_t)world_size * sizeof(local_peer_t);
}

sluice_status_t sluice_comm_create_local(sluice_local_group_t* group, const sluice_comm_config_t* config,
                                         sluice_comm_t** out_comm) {
  if (group == NULL || out_comm == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_local: group or out_comm is NULL");
  }
  *out_comm = NULL;
  sluice_comm_config_t c;
  SLUICE_TRY(sluice_comm_config_read(config, &c));
  if (group->pid != getpid()) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "this local group was made before fork and cannot be used in the child; make a new one there");
  }
  if (c.world_size != group->world_size) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "rank %d: world_size is %d in the config, %d in the group", c.rank,
                       c.world_size, group->world_size);
  }
  local_comm_t* comm = sluice_alloc_zeroed(sluice_process_allocator(), comm_bytes(c.world_size), "local communicator");
  if (comm == NULL) return SLUICE_E_NO_MEMORY;
  sluice_comm_init_base(&comm->base, &local_comm_vtable, "local", &c);
  comm->group = group;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) comm->requests[i].peers = comm->peers + (int64_t)i * c.world_size;

  pthread_mutex_lock(&group->mutex);
  local_end_t* end = &group->ends[c.rank];
  int is_taken = end->state != END_ABSENT;
  if (!is_taken) {
    end->state = END_LIVE;
    end->comm = comm;
    ++group->references;
  }
  pthread_mutex_unlock(&group->mutex);
  if (is_taken) {
    sluice_free(sluice_process_allocator(), comm, comm_bytes(c.world_size));
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "rank %d of this local group is taken or was destroyed; each rank is made once per group",
                       c.rank);
  }
  *out_comm = &comm->base;
  return SLUICE_OK;
}

/* Says once that this rank takes no further part, and whose fault that is: a rank that gives up because of another
 * passes the blame on. A rank that leaves when it is through is no failure, and one whose deadline has passed is none
 * yet: the others reach theirs, and name the laggard themselves. */
static void leave(local_comm_t* comm, int32_t culprit, int32_t is_failed) {
  local_end_t* ends = comm->group->ends;
  if (ends[comm->base.rank].state == END_LOST) return;
  ends[comm->base.rank].lost_to = ends[culprit].state == END_LOST ? ends[culprit].lost_to : culprit;
  ends[comm->base.rank].state = END_LOST;
  ends[comm->base.rank].is_failed = is_failed;
  pthread_cond_broadcast(&comm->group->changed);
}

/* What comes after this exchange on our stream comes after the copies that peers have enqueued out of our buffers. */
static sluice_status_t order(local_comm_t* comm, sluice_comm_request_t* request) {
  sluice_status_t status = SLUICE_OK;
  for (int32_t p = 0; p < comm->base.world_size && request->is_far; ++p) {
    if (!request->peers[p].is_unordered) continue;
    local_comm_t* reader = comm->group->ends[p].comm; /* it stays until its copies are ordered */
    void* event = reader->fetched[comm->base.rank];
    sluice_status_t waited = comm->far.wait(comm->far.user, request->stream, event);
    if (waited != SLUICE_OK) {
      comm->far.drain(comm->far.user, request->stream, event);
      status = waited;
    }
    request->peers[p].is_unordered = 0;
    --reader->unordered;
    pthread_cond_broadcast(&comm->group->changed);
  }
  return status;
}

/* Takes a request back: once nobody copies out of it, its buffers are the caller's again. */
static void withdraw(local_comm_t* comm, sluice_comm_request_t* request, int32_t culprit, int32_t is_failed) {
  while (request->readers > 0) pthread_cond_wait(&comm->group->changed, &comm->group->mutex);
  (void)order(comm, request);
  /* Peers that still need something of it will never get it. */
  if (request->pending > 0) leave(comm, culprit, is_failed);
  request->is_used = 0;
}

static uint64_t fetched_bytes(const local_comm_t* comm) {
  return (uint64_t)comm->base.world_size * sizeof *comm->fetched;
}

static void drop_far(local_comm_t* comm) {
  const sluice_local_far_t far = comm->far;
  for (int32_t p = 0; comm->fetched != NULL && p < comm->base.world_size; ++p) {
    if (comm->fetched[p] != NULL) far.destroy_event(far.user, comm->fetched[p]);
  }
  if (comm->ready != NULL) far.destroy_event(far.user, comm->ready);
  sluice_free(sluice_process_allocator(), comm->fetched, fetched_bytes(comm));
  comm->fetched = NULL;
  comm->ready = NULL;
  memset(&comm->far, 0, sizeof comm->far);
  if (far.released != NULL) far.released(far.user);
}

static void local_destroy(sluice_comm_t* base) {
  local_comm_t* comm = downcast(base);
  sluice_local_group_t* group = comm->group;
  pthread_mutex_lock(&group->mutex);
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    if (comm->requests[i].is_used) withdraw(comm, &comm->requests[i], base->rank, 1);
  }
  leave(comm, base->rank, 0);
  while (comm->unordered > 0) pthread_cond_wait(&group->changed, &group->mutex); /* senders are in the exchange */
  group->ends[base->rank].comm = NULL;
  pthread_mutex_unlock(&group->mutex);
  drop_far(comm);
  sluice_free(sluice_process_allocator(), comm, comm_bytes(base->world_size));
  sluice_local_group_destroy(group);
}

static void local_abort(sluice_comm_t* base) {
  local_comm_t* comm = downcast(base);
  pthread_mutex_lock(&comm->group->mutex);
  comm->is_aborted = 1;
  /* A rank that has given up already has said whose fault that was. */
  int is_lost = comm->group->ends[base->rank].state == END_LOST;
  if (comm->group->aborted_by < 0 && !is_lost) comm->group->aborted_by = base->rank;
  pthread_cond_broadcast(&comm->group->changed);
  pthread_mutex_unlock(&comm->group->mutex);
}

/* ---- exchange -------------------------------------------------------------------------------------------------- */

static sluice_status_t post(local_comm_t* comm, const sluice_exchange_t* exchange, int32_t is_far,
                            sluice_stream_t stream, sluice_comm_request_t** out_request) {
  sluice_comm_t* base = &comm->base;
  pthread_mutex_lock(&comm->group->mutex);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->requests);
  if (request == NULL) {
    pthread_mutex_unlock(&comm->group->mutex);
    return sluice_comm_fail_third(base);
  }
  request->is_used = 1;
  request->is_far = is_far;
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

static sluice_status_t local_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                            sluice_comm_request_t** out_request) {
  return post(downcast(base), exchange, 0, NULL, out_request);
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
static sluice_status_t copy_far(local_comm_t* comm, const sluice_comm_request_t* request, const local_comm_t* sender,
                                const void* from, const local_peer_t* ours) {
  const sluice_local_far_t* far = &comm->far;
  SLUICE_TRY(far->wait(far->user, request->stream, sender->ready));
  SLUICE_TRY(far->copy(far->user, request->stream, ours->recv, from, ours->recv_bytes));
  sluice_status_t status = far->record(far->user, comm->fetched[sender->base.rank], request->stream);
  if (status != SLUICE_OK) far->drain(far->user, request->stream, NULL); /* the sender goes on without an event */
  return status;
}

/* Copies what peer p has posted for us in the request, if anything. Drops the mutex while copying. */
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
  if (posted == NULL && other->num_started <= request->number) return SLUICE_OK; /* not there yet */
  /* A peer that is through with this request had nothing for us and expected nothing. */
  uint64_t their_send_bytes = posted != NULL ? posted->peers[rank].send_bytes : 0;
  uint64_t their_recv_bytes = posted != NULL ? posted->peers[rank].recv_bytes : 0;
  if (their_send_bytes != ours->recv_bytes) note_mismatch(group, p, rank, their_send_bytes, ours->recv_bytes);
  if (their_recv_bytes != ours->send_bytes) note_mismatch(group, rank, p, ours->send_bytes, their_recv_bytes);
  if (posted != NULL && posted->is_far != request->is_far) note_mismatch(group, p, rank, 0, 0);
  if (group->mismatch_from >= 0 || ours->is_received || posted == NULL) return SLUICE_OK;

  sluice_status_t status = SLUICE_OK;
  ++posted->readers;
  pthread_mutex_unlock(&group->mutex);
  if (request->is_far) {
    status = copy_far(comm, request, other, posted->peers[rank].send, ours);
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
    posted->peers[rank].is_unordered = request->is_far;
    comm->unordered += request->is_far;
  }
  pthread_cond_broadcast(&group->changed);
  return status;
}

/* All that has been posted for this rank's requests. */
static sluice_status_t fetch_all(local_comm_t* comm) {
  int32_t world_size = comm->base.world_size;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    for (int32_t step = 1; step < world_size && comm->requests[i].is_used; ++step) {
      SLUICE_TRY(fetch(comm, &comm->requests[i], (comm->base.rank + step) % world_size)); /* not all from rank 0 */
    }
  }
  return SLUICE_OK;
}

/* Rank p takes no further part, and so the group is lost. */
static sluice_status_t fail_lost(const local_comm_t* comm, int32_t p, int32_t* out_culprit, int32_t* out_is_failed) {
  const local_end_t* end = &comm->group->ends[p];
  int32_t rank = comm->base.rank;
  int32_t culprit = end->lost_to;
  *out_culprit = culprit;
  *out_is_failed = end->is_failed || culprit == p;
  return SLUICE_FAIL_PEER(SLUICE_E_PEER_LOST, rank, culprit,
                          "rank %d: rank %d left in the middle of an exchange: it destroyed its communicator or "
                          "gave up waiting; see its log for the reason",
                          rank, culprit);
}

/* Why the request can never complete, or need not, and which rank is at fault; or OK. */
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
                              "ranks %d and %d are in the same exchange, one with memory of a device and one with the "
                              "host's: use contexts of one device type on all ranks of a group",
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
  /* A rank that failed ends the wait for any other: that one may be silent for good. */
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

static sluice_status_t local_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                           int32_t* out_peer) {
  local_comm_t* comm = downcast(base);
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
  sluice_error_info_t why; /* kept from what withdraw may record */
  if (status != SLUICE_OK && status != SLUICE_E_TIMED_OUT) sluice_error_capture(&why);
  if (status != SLUICE_E_TIMED_OUT) withdraw(comm, request, culprit, is_failed);
  pthread_mutex_unlock(&comm->group->mutex);
  return status == SLUICE_OK || status == SLUICE_E_TIMED_OUT ? status : sluice_error_adopt(&why);
}

static void local_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  local_comm_t* comm = downcast(base);
  pthread_mutex_lock(&comm->group->mutex);
  int32_t missing = find_missing(comm, request);
  withdraw(comm, request, missing >= 0 ? missing : base->rank, 0);
  pthread_mutex_unlock(&comm->group->mutex);
}

/* ---- memory of a device ---------------------------------------------------------------------------------------- */

static sluice_status_t local_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                              sluice_stream_t stream) {
  local_comm_t* comm = downcast(base);
  sluice_comm_request_t* request = NULL;
  if (comm->far.copy == NULL) {
    return SLUICE_FAIL_PEER(SLUICE_E_UNSUPPORTED, base->rank, -1,
                            "rank %d: this local communicator has no device: it gets that of a CUDA context made on it",
                            base->rank);
  }
  SLUICE_TRY(comm->far.record(comm->far.user, comm->ready, stream));
  SLUICE_TRY(post(comm, exchange, 1, stream, &request));
  return sluice_comm_exchange_wait(base, request, "the other ranks to enqueue an exchange");
}

/* Nothing that was enqueued waits for a peer. */
static sluice_status_t local_poll(sluice_comm_t* base) {
  (void)base;
  return SLUICE_OK;
}

int sluice_comm_is_local(const sluice_comm_t* comm) { return comm->vtable == &local_comm_vtable; }

void* sluice_local_comm_far(sluice_comm_t* comm) {
  return sluice_comm_is_local(comm) ? downcast(comm)->far.user : NULL;
}

sluice_status_t sluice_local_comm_set_far(sluice_comm_t* base, const sluice_local_far_t* far) {
  local_comm_t* comm = downcast(base);
  if (comm->far.copy != NULL) {
    if (far->released != NULL) far->released(far->user);
    return SLUICE_OK;
  }
  comm->far = *far;
  comm->fetched = sluice_alloc_zeroed(sluice_process_allocator(), fetched_bytes(comm), "events of a communicator");
  sluice_status_t status = comm->fetched == NULL ? SLUICE_E_NO_MEMORY : far->create_event(far->user, &comm->ready);
  for (int32_t p = 0; p < base->world_size && status == SLUICE_OK; ++p) {
    status = far->create_event(far->user, &comm->fetched[p]);
  }
  if (status == SLUICE_OK) return SLUICE_OK;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  drop_far(comm);
  return sluice_error_adopt(&why);
}

/* ---- notes ----------------------------------------------------------------------------------------------------- */

static void local_publish(sluice_comm_t* base, const char* key, const char* value) {
  sluice_local_group_t* group = downcast(base)->group;
  local_note_t* note = &group->ends[base->rank].note; /* each rank leaves one */
  pthread_mutex_lock(&group->mutex);
  snprintf(note->key, sizeof note->key, "%s", key);
  snprintf(note->value, sizeof note->value, "%s", value);
  pthread_mutex_unlock(&group->mutex);
}

static int32_t local_lookup(sluice_comm_t* base, const char* key, char* out, int32_t out_bytes) {
  sluice_local_group_t* group = downcast(base)->group;
  int32_t bytes = 0;
  pthread_mutex_lock(&group->mutex);
  for (int32_t r = 0; r < group->world_size; ++r) {
    const local_note_t* note = &group->ends[r].note;
    if (strcmp(note->key, key) != 0) continue;
    bytes = (int32_t)strlen(note->value);
    if (bytes > out_bytes) bytes = out_bytes;
    memcpy(out, note->value, (size_t)bytes);
  }
  pthread_mutex_unlock(&group->mutex);
  return bytes;
}

static const sluice_comm_vtable_t local_comm_vtable = {
    .destroy = local_destroy,
    .exchange_start = local_exchange_start,
    .exchange_wait = local_exchange_wait,
    .all_reduce_i64 = NULL,
    .abort = local_abort,
    .publish = local_publish,
    .lookup = local_lookup,
    .abandon = local_abandon,
    .exchange_enqueue = local_exchange_enqueue,
    .poll = local_poll,
};
