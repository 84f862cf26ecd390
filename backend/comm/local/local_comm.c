/* The ranks are threads of one process: the smallest complete transport, and the one to copy for a new one.
 *
 * A rank posts its request in the group; a waiting rank copies what its peers have posted for the same request number
 * straight out of their send buffers. So only a rank's own thread writes its memory, and a request is complete when
 * everything has come in and everything has been fetched. A wait serves both requests in flight: two ranks may wait for
 * theirs in different orders.
 *
 * Everything here is guarded by the group's mutex, except the bytes being copied: `readers` keeps the request they
 * belong to alive meanwhile. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/comm.h"

enum { MAX_IN_FLIGHT = 2 };

typedef struct local_comm_s local_comm_t;

typedef struct local_peer_s { /* one peer's part of a request */
  const void* send;
  void* recv;
  uint64_t send_bytes;
  uint64_t recv_bytes;
  int32_t is_sent; /* the peer has fetched it, or there is nothing to send */
  int32_t is_received;
} local_peer_t;

struct sluice_comm_request_s {
  int32_t is_used;
  int32_t readers;     /* peers copying out of our send buffers right now */
  int32_t pending;     /* entries of peers[] not yet sent plus not yet received */
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
  sluice_comm_request_t requests[MAX_IN_FLIGHT];
  local_peer_t peers[]; /* [MAX_IN_FLIGHT * W] */
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
  return sizeof(local_comm_t) + MAX_IN_FLIGHT * (uint64_t)world_size * sizeof(local_peer_t);
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
  for (int i = 0; i < MAX_IN_FLIGHT; ++i) comm->requests[i].peers = comm->peers + (int64_t)i * c.world_size;

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
 * passes the blame on. */
static void leave(local_comm_t* comm, int32_t culprit) {
  local_end_t* ends = comm->group->ends;
  if (ends[comm->base.rank].state == END_LOST) return;
  ends[comm->base.rank].lost_to = ends[culprit].state == END_LOST ? ends[culprit].lost_to : culprit;
  ends[comm->base.rank].state = END_LOST;
  pthread_cond_broadcast(&comm->group->changed);
}

/* Takes a request back: once nobody copies out of it, its buffers are the caller's again. */
static void withdraw(local_comm_t* comm, sluice_comm_request_t* request, int32_t culprit) {
  while (request->readers > 0) pthread_cond_wait(&comm->group->changed, &comm->group->mutex);
  if (request->pending > 0) leave(comm, culprit); /* peers that still need something of it will never get it */
  request->is_used = 0;
}

static void local_destroy(sluice_comm_t* base) {
  local_comm_t* comm = downcast(base);
  sluice_local_group_t* group = comm->group;
  pthread_mutex_lock(&group->mutex);
  for (int i = 0; i < MAX_IN_FLIGHT; ++i) {
    if (comm->requests[i].is_used) withdraw(comm, &comm->requests[i], base->rank);
  }
  leave(comm, base->rank);
  group->ends[base->rank].comm = NULL;
  pthread_mutex_unlock(&group->mutex);
  sluice_free(sluice_process_allocator(), comm, comm_bytes(base->world_size));
  sluice_local_group_destroy(group);
}

static void local_abort(sluice_comm_t* base) {
  local_comm_t* comm = downcast(base);
  pthread_mutex_lock(&comm->group->mutex);
  comm->is_aborted = 1;
  if (comm->group->aborted_by < 0) comm->group->aborted_by = base->rank;
  pthread_cond_broadcast(&comm->group->changed);
  pthread_mutex_unlock(&comm->group->mutex);
}

/* ---- exchange -------------------------------------------------------------------------------------------------- */

static sluice_status_t local_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                            sluice_comm_request_t** out_request) {
  local_comm_t* comm = downcast(base);
  pthread_mutex_lock(&comm->group->mutex);
  sluice_comm_request_t* request = NULL;
  for (int i = 0; i < MAX_IN_FLIGHT && request == NULL; ++i) {
    if (!comm->requests[i].is_used) request = &comm->requests[i];
  }
  if (request == NULL) {
    pthread_mutex_unlock(&comm->group->mutex);
    return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, base->rank, -1, "rank %d started a third exchange, two are in flight",
                            base->rank);
  }
  request->is_used = 1;
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

static void note_mismatch(sluice_local_group_t* group, int32_t from, int32_t to, uint64_t sent, uint64_t expected) {
  if (group->mismatch_from >= 0) return;
  group->mismatch_from = from;
  group->mismatch_to = to;
  group->mismatch_sent = sent;
  group->mismatch_expected = expected;
  pthread_cond_broadcast(&group->changed);
}

/* Copies what peer p has posted for us in the request, if anything. Drops the mutex while copying. */
static void fetch(local_comm_t* comm, sluice_comm_request_t* request, int32_t p) {
  sluice_local_group_t* group = comm->group;
  int32_t rank = comm->base.rank;
  local_peer_t* ours = &request->peers[p];
  local_comm_t* other = group->ends[p].comm;
  if ((ours->is_sent && ours->is_received) || group->ends[p].state != END_LIVE) return;

  sluice_comm_request_t* posted = NULL;
  for (int i = 0; i < MAX_IN_FLIGHT; ++i) {
    if (other->requests[i].is_used && other->requests[i].number == request->number) posted = &other->requests[i];
  }
  if (posted == NULL && other->num_started <= request->number) return; /* not there yet */
  /* A peer that is through with this request had nothing for us and expected nothing. */
  uint64_t their_send_bytes = posted != NULL ? posted->peers[rank].send_bytes : 0;
  uint64_t their_recv_bytes = posted != NULL ? posted->peers[rank].recv_bytes : 0;
  if (their_send_bytes != ours->recv_bytes) note_mismatch(group, p, rank, their_send_bytes, ours->recv_bytes);
  if (their_recv_bytes != ours->send_bytes) note_mismatch(group, rank, p, ours->send_bytes, their_recv_bytes);
  if (group->mismatch_from >= 0 || ours->is_received || posted == NULL) return;

  ++posted->readers;
  pthread_mutex_unlock(&group->mutex);
  memcpy(ours->recv, posted->peers[rank].send, ours->recv_bytes);
  pthread_mutex_lock(&group->mutex);
  --posted->readers;
  ours->is_received = 1;
  --request->pending;
  posted->peers[rank].is_sent = 1;
  --posted->pending;
  pthread_cond_broadcast(&group->changed);
}

/* Why the request can never complete, and which rank is at fault; or OK. */
static sluice_status_t find_failure(local_comm_t* comm, const sluice_comm_request_t* request, int32_t* out_culprit) {
  const sluice_local_group_t* group = comm->group;
  int32_t rank = comm->base.rank;
  *out_culprit = rank;
  if (comm->is_aborted) {
    return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, rank, -1, "rank %d: this communicator was aborted", rank);
  }
  if (group->mismatch_from >= 0) {
    int32_t from = group->mismatch_from;
    int32_t to = group->mismatch_to;
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
    if (is_needed && group->ends[p].state == END_LOST) {
      p = group->ends[p].lost_to;
      *out_culprit = p;
      return SLUICE_FAIL_PEER(SLUICE_E_PEER_LOST, rank, p,
                              "rank %d: rank %d left in the middle of an exchange: it destroyed its communicator or "
                              "gave up waiting; see its log for the reason",
                              rank, p);
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
  pthread_mutex_lock(&comm->group->mutex);
  for (;;) {
    for (int i = 0; i < MAX_IN_FLIGHT; ++i) {
      for (int32_t step = 1; step < base->world_size && comm->requests[i].is_used; ++step) {
        fetch(comm, &comm->requests[i], (base->rank + step) % base->world_size); /* not all from rank 0 at once */
      }
    }
    if (request->pending == 0) break;
    status = find_failure(comm, request, &culprit);
    if (status != SLUICE_OK) break;
    if (sluice_cond_wait_until(&comm->group->changed, &comm->group->mutex, deadline_ns) == ETIMEDOUT) {
      if (out_peer != NULL) *out_peer = find_missing(comm, request);
      status = SLUICE_E_TIMED_OUT;
      break;
    }
  }
  if (status != SLUICE_E_TIMED_OUT) withdraw(comm, request, culprit);
  pthread_mutex_unlock(&comm->group->mutex);
  return status;
}

static void local_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  local_comm_t* comm = downcast(base);
  pthread_mutex_lock(&comm->group->mutex);
  int32_t missing = find_missing(comm, request);
  withdraw(comm, request, missing >= 0 ? missing : base->rank);
  pthread_mutex_unlock(&comm->group->mutex);
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
};
