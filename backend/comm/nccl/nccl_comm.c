#include "backend/comm/nccl/nccl_comm.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/nccl/nccl_parts.h"

#define POLL_NS          UINT64_C(50000)
#define FINALIZE_WAIT_NS UINT64_C(2000000000)

/* ---- errors ---------------------------------------------------------------------------------------------------- */

void sluice_nccl_abort_group(nccl_comm_t* comm) {
  pthread_mutex_lock(&comm->mutex);
  if (comm->comm != NULL) (void)comm->nccl.ncclCommAbort(comm->comm);
  comm->comm = NULL;
  pthread_mutex_unlock(&comm->mutex);
}

/* Leaves a note why this rank is gone: "aborted", "left", or "because N" when it gives up for another one's sake. */
static void note_gone(nccl_comm_t* comm, const char* why) {
  char key[32];
  if (comm->store.publish == NULL || comm->has_note) return;
  comm->has_note = 1;
  snprintf(key, sizeof key, "sluice/gone/%d", comm->base.rank);
  comm->store.publish(comm->store.user, key, why);
}

/* The rank to blame for a remote error: one that aborted, else the one that others blame, else one that left; -1. */
static int32_t find_culprit(const nccl_comm_t* comm) {
  int32_t blamed = -1, left = -1;
  for (int32_t r = 0; r < comm->base.world_size && comm->store.lookup != NULL; ++r) {
    char key[32];
    char why[32] = "";
    int named;
    snprintf(key, sizeof key, "sluice/gone/%d", r);
    if (r == comm->base.rank || comm->store.lookup(comm->store.user, key, why, (int32_t)sizeof why - 1) <= 0) continue;
    if (strcmp(why, "aborted") == 0) return r;
    if (sscanf(why, "because %d", &named) == 1 && named != comm->base.rank) blamed = named;
    if (strcmp(why, "left") == 0) left = r;
  }
  return blamed >= 0 ? blamed : left;
}

sluice_status_t sluice_nccl_fail(nccl_comm_t* comm, int code, const char* what) {
  int rank = comm->base.rank;
  sluice_status_t status = code == SLUICE_NCCL_REMOTE_ERROR ? SLUICE_E_PEER_LOST : SLUICE_E_FOREIGN;
  char detail[256] = "";
  pthread_mutex_lock(&comm->mutex);
  const char* last = comm->comm != NULL ? comm->nccl.ncclGetLastError(comm->comm) : NULL;
  if (last != NULL) snprintf(detail, sizeof detail, "%s", last);
  pthread_mutex_unlock(&comm->mutex);
  int32_t culprit = status == SLUICE_E_PEER_LOST ? find_culprit(comm) : -1;
  char gone[48] = "";
  char why[32];
  if (culprit >= 0) snprintf(gone, sizeof gone, "rank %d is gone: ", culprit);
  status = sluice_error_record(status, rank, culprit, code, "rank %d: nccl: %s: %s%s (%d) %s; see NCCL_DEBUG=WARN",
                               rank, what, gone, comm->nccl.ncclGetErrorString(code), code, detail);
  snprintf(why, sizeof why, "because %d", culprit);
  note_gone(comm, culprit >= 0 ? why : "aborted");
  sluice_nccl_abort_group(comm);
  return status;
}

sluice_status_t sluice_nccl_fail_aborted(nccl_comm_t* comm) {
  sluice_nccl_abort_group(comm);
  return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->base.rank, -1, "rank %d: this communicator was aborted",
                          comm->base.rank);
}

int sluice_nccl_state(nccl_comm_t* comm) {
  int state = 0;
  pthread_mutex_lock(&comm->mutex);
  int code = comm->comm != NULL ? comm->nccl.ncclCommGetAsyncError(comm->comm, &state) : 0;
  pthread_mutex_unlock(&comm->mutex);
  return code != 0 ? code : state;
}

void sluice_nccl_nap(void) {
  const struct timespec t = {.tv_nsec = POLL_NS};
  nanosleep(&t, NULL);
}

sluice_status_t sluice_nccl_settle(nccl_comm_t* comm, const char* what, uint64_t deadline_ns) {
  for (;;) {
    if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
    int state = sluice_nccl_state(comm);
    if (state == 0) return SLUICE_OK;
    if (state != SLUICE_NCCL_IN_PROGRESS) return sluice_nccl_fail(comm, state, what);
    if (sluice_now_ns() >= deadline_ns) {
      sluice_nccl_abort_group(comm);
      return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->base.rank, -1,
                              "rank %d: nccl: %s took longer than %.1f s: a rank is missing, or the network between "
                              "ranks does not work; see NCCL_DEBUG=INFO on all ranks",
                              comm->base.rank, what, (double)comm->base.timeout_ns / 1e9);
    }
    sluice_nccl_nap();
  }
}

sluice_status_t sluice_nccl_make_ready(nccl_comm_t* comm, uint64_t deadline_ns) {
  if (comm->is_ready) return SLUICE_OK;
  SLUICE_TRY(sluice_nccl_settle(comm, "the start of the group", deadline_ns));
  comm->is_ready = 1;
  return SLUICE_OK;
}

uint64_t sluice_nccl_deadline_of(const nccl_comm_t* comm) {
  return sluice_add_saturating(sluice_now_ns(), comm->base.timeout_ns);
}

/* ---- one group of sends and receives --------------------------------------------------------------------------- */

/* Of a call inside a group: IN_PROGRESS is no error, and the calls behind it belong to the same exchange. */
static int is_taken(int code) { return code == 0 || code == SLUICE_NCCL_IN_PROGRESS; }

/* Device memory only. The group is closed on every path: an open one would swallow this thread's next calls. */
static int post(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream) {
  const sluice_nccl_symbols_t* nccl = &comm->nccl;
  int32_t world_size = comm->base.world_size, rank = comm->base.rank;
  pthread_mutex_lock(&comm->mutex);
  if (comm->comm == NULL) {
    pthread_mutex_unlock(&comm->mutex);
    return SLUICE_NCCL_REMOTE_ERROR;
  }
  int code = nccl->ncclGroupStart();
  if (code == 0) {
    for (int32_t i = 1; i < world_size && is_taken(code); ++i) {
      int32_t peer = (rank + world_size - i) % world_size;
      if (e->recv_bytes[peer] == 0) continue;
      code = nccl->ncclRecv(e->recv[peer], e->recv_bytes[peer], SLUICE_NCCL_UINT8, peer, comm->comm, stream);
    }
    for (int32_t i = 1; i < world_size && is_taken(code); ++i) {
      int32_t peer = (rank + i) % world_size; /* not all to rank 0 at once */
      if (e->send_bytes[peer] == 0) continue;
      code = nccl->ncclSend(e->send[peer], e->send_bytes[peer], SLUICE_NCCL_UINT8, peer, comm->comm, stream);
    }
    int ended = nccl->ncclGroupEnd();
    if (is_taken(code)) code = ended;
  }
  pthread_mutex_unlock(&comm->mutex);
  return code;
}

sluice_status_t sluice_nccl_run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream) {
  uint64_t deadline_ns = sluice_nccl_deadline_of(comm);
  SLUICE_TRY(sluice_nccl_make_ready(comm, deadline_ns));
  int code = post(comm, e, stream);
  if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
  if (code != 0 && code != SLUICE_NCCL_IN_PROGRESS) return sluice_nccl_fail(comm, code, "an exchange");
  /* Only then the kernel is in the stream, and an event after it means something. */
  return code == 0 ? SLUICE_OK : sluice_nccl_settle(comm, "the set-up of an exchange", deadline_ns);
}

sluice_status_t sluice_nccl_leave_with(nccl_comm_t* comm, sluice_status_t status) {
  sluice_error_info_t why;
  if (status != SLUICE_OK) sluice_error_capture(&why);
  sluice_status_t left = sluice_cuda_leave(comm->device);
  return status == SLUICE_OK ? left : sluice_error_adopt(&why);
}

void sluice_nccl_mark_broken(sluice_comm_t* comm, sluice_status_t status) {
  int32_t expected = SLUICE_OK;
  if (status != SLUICE_OK) atomic_compare_exchange_strong(&comm->broken, &expected, status);
}

sluice_status_t sluice_nccl_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  sluice_status_t broken = atomic_load(&base->broken);
  if (broken != SLUICE_OK) {
    return SLUICE_FAIL_PEER(broken, base->rank, -1, "rank %d: this nccl communicator is no longer usable", base->rank);
  }
  SLUICE_TRY(sluice_cuda_enter(comm->device));
  sluice_status_t status = sluice_nccl_leave_with(comm, sluice_nccl_run_group(comm, exchange, stream));
  sluice_nccl_mark_broken(base, status);
  if (status == SLUICE_OK) ++base->num_started;
  return status;
}

sluice_status_t sluice_nccl_poll(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  if (atomic_load(&comm->is_aborted)) return sluice_nccl_fail_aborted(comm);
  int state = sluice_nccl_state(comm);
  if (state == 0 || state == SLUICE_NCCL_IN_PROGRESS) return SLUICE_OK;
  sluice_status_t status = sluice_nccl_fail(comm, state, "an exchange that was enqueued");
  sluice_nccl_mark_broken(base, status);
  return status;
}

static void nccl_abort(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  atomic_store(&comm->is_aborted, 1);
  note_gone(comm, "aborted");
  sluice_nccl_abort_group(comm);
}

/* ---- create and destroy ---------------------------------------------------------------------------------------- */

/* In order where nothing is outstanding, by abort otherwise: both end in bounded time. */
static void end_nccl(nccl_comm_t* comm) {
  int32_t in_flight = !SLUICE_REQUESTS_ARE_FREE(comm->requests);
  if (comm->comm == NULL) return;
  if (in_flight || !comm->is_ready || atomic_load(&comm->base.broken) != SLUICE_OK) {
    sluice_nccl_abort_group(comm);
    return;
  }
  uint64_t deadline_ns = sluice_now_ns() + FINALIZE_WAIT_NS;
  int code = comm->nccl.ncclCommFinalize(comm->comm);
  while (code == SLUICE_NCCL_IN_PROGRESS && sluice_now_ns() < deadline_ns) {
    sluice_nccl_nap();
    code = sluice_nccl_state(comm);
  }
  /* One that is destroyed in the background is gone: to abort it as well would end it twice. */
  if (code == 0 && is_taken(comm->nccl.ncclCommDestroy(comm->comm))) {
    comm->comm = NULL;
  } else {
    sluice_nccl_abort_group(comm);
  }
}

static void nccl_destroy(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  int is_current = sluice_cuda_enter(comm->device) == SLUICE_OK;
  note_gone(comm, "left");
  end_nccl(comm);
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    sluice_comm_request_t* r = &comm->requests[i];
    if (r->done != NULL) (void)comm->driver->cuEventDestroy_v2(r->done);
    if (r->staging.pinned != NULL) (void)comm->driver->cuMemFreeHost(r->staging.pinned);
    sluice_free(comm->memory, r->staging.on_device, r->staging.bytes);
  }
  if (comm->stream != NULL) (void)comm->driver->cuStreamDestroy_v2(comm->stream);
  if (is_current) (void)sluice_cuda_leave(comm->device);
  pthread_mutex_destroy(&comm->mutex);
  sluice_free(sluice_process_allocator(), comm->requests[0].host_recv, comm->arrays_bytes);
  void (*released)(void* user) = comm->released;
  void* user = comm->released_user;
  sluice_free(sluice_process_allocator(), comm, sizeof *comm);
  if (released != NULL) released(user);
}

static void nccl_publish(sluice_comm_t* base, const char* key, const char* value) {
  sluice_nccl_downcast(base)->store.publish(sluice_nccl_downcast(base)->store.user, key, value);
}
static int32_t nccl_lookup(sluice_comm_t* base, const char* key, char* out, int32_t out_bytes) {
  return sluice_nccl_downcast(base)->store.lookup(sluice_nccl_downcast(base)->store.user, key, out, out_bytes);
}

static const sluice_comm_vtable_t nccl_vtable = {
    .destroy = nccl_destroy,
    .exchange_start = sluice_nccl_exchange_start,
    .exchange_wait = sluice_nccl_exchange_wait,
    .all_reduce_i64 = NULL,
    .abort = nccl_abort,
    .abandon = sluice_nccl_abandon,
    .exchange_enqueue = sluice_nccl_exchange_enqueue,
    .poll = sluice_nccl_poll,
    .memory_refusal = sluice_nccl_refusal_of_memory,
    .allocate = sluice_nccl_allocate,
    .release = sluice_nccl_release,
    .is_capturable = 1,
};

static const sluice_comm_vtable_t nccl_vtable_with_store = {
    .destroy = nccl_destroy,
    .exchange_start = sluice_nccl_exchange_start,
    .exchange_wait = sluice_nccl_exchange_wait,
    .all_reduce_i64 = NULL,
    .abort = nccl_abort,
    .publish = nccl_publish,
    .lookup = nccl_lookup,
    .abandon = sluice_nccl_abandon,
    .exchange_enqueue = sluice_nccl_exchange_enqueue,
    .poll = sluice_nccl_poll,
    .memory_refusal = sluice_nccl_refusal_of_memory,
    .allocate = sluice_nccl_allocate,
    .release = sluice_nccl_release,
    .is_capturable = 1,
};

static sluice_status_t allocate_arrays(nccl_comm_t* comm) {
  uint64_t world_size = (uint64_t)comm->base.world_size;
  comm->arrays_bytes = world_size * SLUICE_MAX_IN_FLIGHT * (sizeof(void*) + 2 * sizeof(uint64_t));
  char* at = sluice_alloc_zeroed(sluice_process_allocator(), comm->arrays_bytes, "nccl requests");
  if (at == NULL) return SLUICE_E_NO_MEMORY;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    comm->requests[i].host_recv = (void**)(void*)at;
    comm->requests[i].recv_bytes = (uint64_t*)(void*)(at + world_size * sizeof(void*));
    comm->requests[i].recv_at = comm->requests[i].recv_bytes + world_size;
    at += world_size * (sizeof(void*) + 2 * sizeof(uint64_t));
  }
  return SLUICE_OK;
}

static sluice_status_t open_inside(nccl_comm_t* comm, const sluice_nccl_options_t* options) {
  int least = 0, greatest = 0;
  int code = comm->driver->cuCtxGetStreamPriorityRange(&least, &greatest);
  if (code == 0)
    code = comm->driver->cuStreamCreateWithPriority(&comm->stream, SLUICE_CU_STREAM_NON_BLOCKING, greatest);
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT && code == 0; ++i) {
    code = comm->driver->cuEventCreate(&comm->requests[i].done, SLUICE_CU_EVENT_DISABLE_TIMING);
  }
  if (code != 0) return sluice_cuda_fail(comm->driver, code, "no stream or event for nccl");
  sluice_nccl_config_t config = {
      .size = sizeof config, .magic = SLUICE_NCCL_MAGIC, .version = SLUICE_NCCL_CONFIG_VERSION, .blocking = 0};
  if (options->parent != NULL) return sluice_nccl_split(comm, options->parent, options->color, &config);
  code = comm->nccl.ncclCommInitRankConfig(&comm->comm, comm->base.world_size, *options->id, comm->base.rank, &config);
  if (is_taken(code)) return SLUICE_OK;
  comm->comm = NULL;
  return sluice_nccl_fail(comm, code, "the group cannot be made");
}

static sluice_status_t check_options(const sluice_nccl_options_t* options, const sluice_comm_config_t* config,
                                     sluice_comm_config_t* out_config) {
  SLUICE_TRY(sluice_comm_config_read(config, out_config));
  if ((options->id == NULL) != (options->parent == NULL)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "nccl: give either an id or a communicator to split");
}

sluice_status_t sluice_nccl_comm_create(const sluice_nccl_options_t* options, const sluice_comm_config_t* config,
                                        sluice_comm_t** out_comm) {
  *out_comm = NULL;
  sluice_comm_config_t c;
  nccl_comm_t* comm = NULL;
  sluice_status_t status = check_options(options, config, &c);
  if (status == SLUICE_OK) {
    comm = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *comm, "nccl communicator");
    if (comm == NULL) status = SLUICE_E_NO_MEMORY;
  }
  if (status != SLUICE_OK) {
    if (options->released != NULL) options->released(options->released_user);
    return status;
  }
  comm->released = options->released;
  comm->released_user = options->released_user;
  if (options->store != NULL) comm->store = *options->store;
  sluice_comm_init_base(&comm->base, options->store != NULL ? &nccl_vtable_with_store : &nccl_vtable, "nccl", &c);
  comm->nccl = *options->symbols;
  comm->device = options->device;
  comm->driver = sluice_cuda_device_driver(options->device);
  comm->memory = options->memory;
  pthread_mutex_init(&comm->mutex, NULL);
  status = allocate_arrays(comm);
  if (status != SLUICE_OK) goto err_destroy;
  status = sluice_cuda_enter(comm->device);
  if (status != SLUICE_OK) goto err_destroy;
  status = sluice_nccl_leave_with(comm, open_inside(comm, options));
  if (status != SLUICE_OK) goto err_destroy;
  *out_comm = &comm->base;
  return SLUICE_OK;

err_destroy : {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  nccl_destroy(&comm->base);
  return sluice_error_adopt(&why);
}
}
