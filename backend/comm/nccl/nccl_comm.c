#include "backend/comm/nccl/nccl_comm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/log.h"
#include "backend/comm/nccl/nccl_memory.h"
#include "backend/device/cuda/cuda_device.h"

/* The request after those of the host is the agreement's. */
enum { MAX_IN_FLIGHT = 2, AGREEMENT = MAX_IN_FLIGHT, NUM_REQUESTS = MAX_IN_FLIGHT + 1, HOST = 0, DEVICE = 1 };
/* Whether buffers are registered: what all ranks have agreed. */
enum { UNDECIDED = 0, UNREGISTERED = 1, REGISTERED = 2 };
#define POLL_NS          UINT64_C(50000)
#define FINALIZE_WAIT_NS UINT64_C(2000000000)

/* Where a request's host buffers pass through: the same layout in pinned and in device memory. */
typedef struct staging_s {
  char* pinned;
  char* on_device;
  uint64_t bytes;
} staging_t;

struct sluice_comm_request_s {
  int32_t is_used;
  void* done; /* event */
  staging_t staging;
  void** host_recv; /* [W] where received bytes go in the wait, NULL: nothing to do */
  uint64_t* recv_bytes;
  uint64_t* recv_at; /* in the staging */
};

typedef struct nccl_comm_s {
  sluice_comm_t base;
  sluice_nccl_symbols_t nccl;
  sluice_device_t* device;
  const sluice_cuda_driver_t* driver;
  sluice_allocator_t* memory;
  pthread_mutex_t mutex; /* around every use of `comm`: abort comes from any thread */
  void* comm;            /* NULL after ncclCommAbort */
  int32_t is_ready;
  int32_t has_note;
  _Atomic int32_t is_aborted; /* by this rank's abort() */
  void* stream;
  sluice_nccl_store_t store;
  void (*released)(void* user);
  void* released_user;
  uint64_t arrays_bytes;
  int32_t registers;   /* UNDECIDED, ... */
  int32_t* words;      /* [W] what each rank said */
  const char* refusal; /* why this rank said no */
  char refusal_text[160];
  sluice_nccl_block_t* blocks;
  sluice_comm_request_t requests[NUM_REQUESTS];
} nccl_comm_t;

static nccl_comm_t* downcast(sluice_comm_t* comm) { return (nccl_comm_t*)comm; }

/* ---- errors ---------------------------------------------------------------------------------------------------- */

/* Frees streams of kernels that wait for ever. May be repeated. */
static void abort_nccl(nccl_comm_t* comm) {
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

static sluice_status_t fail(nccl_comm_t* comm, int code, const char* what) {
  int rank = comm->base.rank;
  sluice_status_t status = code == SLUICE_NCCL_REMOTE_ERROR ? SLUICE_E_PEER_LOST : SLUICE_E_FOREIGN;
  char detail[256] = "";
  pthread_mutex_lock(&comm->mutex);
  const char* last = comm->comm != NULL ? comm->nccl.ncclGetLastError(comm->comm) : NULL;
  if (last != NULL) strncat(detail, last, sizeof detail - 1);
  pthread_mutex_unlock(&comm->mutex);
  int32_t culprit = status == SLUICE_E_PEER_LOST ? find_culprit(comm) : -1;
  char gone[48] = "";
  char why[32];
  if (culprit >= 0) snprintf(gone, sizeof gone, "rank %d is gone: ", culprit);
  status = sluice_error_record(status, rank, culprit, code, "rank %d: nccl: %s: %s%s (%d) %s; see NCCL_DEBUG=WARN",
                               rank, what, gone, comm->nccl.ncclGetErrorString(code), code, detail);
  snprintf(why, sizeof why, "because %d", culprit);
  note_gone(comm, culprit >= 0 ? why : "aborted");
  abort_nccl(comm);
  return status;
}

static sluice_status_t fail_aborted(nccl_comm_t* comm) {
  abort_nccl(comm);
  return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->base.rank, -1, "rank %d: this communicator was aborted",
                          comm->base.rank);
}

/* The state of the communicator: 0, IN_PROGRESS, or an error. */
static int async_state(nccl_comm_t* comm) {
  int state = 0;
  pthread_mutex_lock(&comm->mutex);
  int code = comm->comm != NULL ? comm->nccl.ncclCommGetAsyncError(comm->comm, &state) : 0;
  pthread_mutex_unlock(&comm->mutex);
  return code != 0 ? code : state;
}

static void nap(void) {
  const struct timespec t = {.tv_nsec = POLL_NS};
  nanosleep(&t, NULL);
}

/* Until NCCL has done in the background what it was asked: start, connect, launch. */
static sluice_status_t settle(nccl_comm_t* comm, const char* what, uint64_t deadline_ns) {
  for (;;) {
    if (atomic_load(&comm->is_aborted)) return fail_aborted(comm);
    int state = async_state(comm);
    if (state == 0) return SLUICE_OK;
    if (state != SLUICE_NCCL_IN_PROGRESS) return fail(comm, state, what);
    if (sluice_now_ns() >= deadline_ns) {
      abort_nccl(comm);
      return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->base.rank, -1,
                              "rank %d: nccl: %s took longer than %.1f s: a rank is missing, or the network between "
                              "ranks does not work; see NCCL_DEBUG=INFO on all ranks",
                              comm->base.rank, what, (double)comm->base.timeout_ns / 1e9);
    }
    nap();
  }
}

static sluice_status_t tell_word(nccl_comm_t* comm);

static sluice_status_t make_ready(nccl_comm_t* comm, uint64_t deadline_ns) {
  if (comm->is_ready) return SLUICE_OK;
  SLUICE_TRY(settle(comm, "the start of the group", deadline_ns));
  comm->is_ready = 1;
  return comm->registers == UNDECIDED ? tell_word(comm) : SLUICE_OK;
}

static uint64_t deadline_of(const nccl_comm_t* comm) {
  uint64_t now = sluice_now_ns();
  return now > UINT64_MAX - comm->base.timeout_ns ? UINT64_MAX : now + comm->base.timeout_ns;
}

/* ---- one group of sends and receives --------------------------------------------------------------------------- */

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
    for (int32_t i = 1; i < world_size && code == 0; ++i) {
      int32_t peer = (rank + world_size - i) % world_size;
      if (e->recv_bytes[peer] == 0) continue;
      code = nccl->ncclRecv(e->recv[peer], e->recv_bytes[peer], SLUICE_NCCL_UINT8, peer, comm->comm, stream);
    }
    for (int32_t i = 1; i < world_size && code == 0; ++i) {
      int32_t peer = (rank + i) % world_size; /* not all to rank 0 at once */
      if (e->send_bytes[peer] == 0) continue;
      code = nccl->ncclSend(e->send[peer], e->send_bytes[peer], SLUICE_NCCL_UINT8, peer, comm->comm, stream);
    }
    int ended = nccl->ncclGroupEnd();
    if (code == 0 || code == SLUICE_NCCL_IN_PROGRESS) code = ended;
  }
  pthread_mutex_unlock(&comm->mutex);
  return code;
}

/* The device is entered. */
static sluice_status_t run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream) {
  uint64_t deadline_ns = deadline_of(comm);
  SLUICE_TRY(make_ready(comm, deadline_ns));
  int code = post(comm, e, stream);
  if (atomic_load(&comm->is_aborted)) return fail_aborted(comm);
  if (code != 0 && code != SLUICE_NCCL_IN_PROGRESS) return fail(comm, code, "an exchange");
  /* Only then the kernel is in the stream, and an event after it means something. */
  return code == 0 ? SLUICE_OK : settle(comm, "the set-up of an exchange", deadline_ns);
}

static sluice_status_t leave_with(nccl_comm_t* comm, sluice_status_t status) {
  sluice_error_info_t why;
  if (status != SLUICE_OK) sluice_error_capture(&why);
  sluice_status_t left = sluice_cuda_leave(comm->device);
  return status == SLUICE_OK ? left : sluice_error_adopt(&why);
}

static void mark_broken(sluice_comm_t* comm, sluice_status_t status) {
  int32_t expected = SLUICE_OK;
  if (status != SLUICE_OK) atomic_compare_exchange_strong(&comm->broken, &expected, status);
}

sluice_status_t sluice_nccl_exchange_enqueue(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream) {
  nccl_comm_t* comm = downcast(base);
  sluice_status_t broken = atomic_load(&base->broken);
  if (broken != SLUICE_OK) {
    return SLUICE_FAIL_PEER(broken, base->rank, -1, "rank %d: this nccl communicator is no longer usable", base->rank);
  }
  SLUICE_TRY(sluice_cuda_enter(comm->device));
  sluice_status_t status = leave_with(comm, run_group(comm, exchange, stream));
  mark_broken(base, status);
  if (status == SLUICE_OK) ++base->num_started;
  return status;
}

sluice_status_t sluice_nccl_poll(sluice_comm_t* base) {
  nccl_comm_t* comm = downcast(base);
  if (atomic_load(&comm->is_aborted)) return fail_aborted(comm);
  int state = async_state(comm);
  if (state == 0 || state == SLUICE_NCCL_IN_PROGRESS) return SLUICE_OK;
  sluice_status_t status = fail(comm, state, "an exchange that was enqueued");
  mark_broken(base, status);
  return status;
}

/* ---- the host's way -------------------------------------------------------------------------------------------- */

static sluice_status_t reserve_staging(nccl_comm_t* comm, staging_t* s, uint64_t bytes) {
  if (bytes <= s->bytes) return SLUICE_OK;
  if (s->pinned != NULL) (void)comm->driver->cuMemFreeHost(s->pinned);
  sluice_free(comm->memory, s->on_device, s->bytes);
  *s = (staging_t){.pinned = NULL};
  bytes = sluice_align_up(bytes);
  s->on_device = sluice_alloc(comm->memory, bytes, "nccl staging");
  if (s->on_device == NULL) return SLUICE_E_NO_MEMORY;
  s->bytes = bytes;
  void* pinned = NULL;
  int code = comm->driver->cuMemHostAlloc(&pinned, bytes, SLUICE_CU_MEMHOSTALLOC_PORTABLE);
  if (code != 0) {
    sluice_free(comm->memory, s->on_device, s->bytes);
    *s = (staging_t){.pinned = NULL};
    return sluice_cuda_fail(comm->driver, code, "%llu bytes of pinned staging for nccl", (unsigned long long)bytes);
  }
  s->pinned = pinned;
  return SLUICE_OK;
}

static int where(const nccl_comm_t* comm, const void* data) {
  unsigned int type = 0;
  int code =
      comm->driver->cuPointerGetAttribute(&type, SLUICE_CU_POINTER_MEMORY_TYPE, (unsigned long long)(uintptr_t)data);
  return code == 0 && type == SLUICE_CU_MEMORY_DEVICE ? DEVICE : HOST;
}

static unsigned long long address(const void* data) { return (unsigned long long)(uintptr_t)data; }

/* Replaces host buffers by places in the staging, brings the sends to the device, posts, and brings receives back to
 * pinned memory. send and recv: [W], the caller's to fill. */
static sluice_status_t run_staged(nccl_comm_t* comm, sluice_comm_request_t* r, const sluice_exchange_t* e,
                                  const void** send, void** recv) {
  int32_t world_size = comm->base.world_size;
  uint64_t sent = 0, all = 0;
  for (int32_t p = 0; p < world_size; ++p) {
    send[p] = NULL;
    recv[p] = NULL;
    r->host_recv[p] = NULL;
    r->recv_bytes[p] = 0;
    if (p == comm->base.rank) continue;
    send[p] = e->send[p];
    recv[p] = e->recv[p];
    if (e->send_bytes[p] > 0 && where(comm, e->send[p]) == HOST) all += sluice_align_up(e->send_bytes[p]);
  }
  sent = all;
  for (int32_t p = 0; p < world_size; ++p) {
    if (p == comm->base.rank || e->recv_bytes[p] == 0 || where(comm, e->recv[p]) == DEVICE) continue;
    r->host_recv[p] = e->recv[p];
    r->recv_bytes[p] = e->recv_bytes[p];
    r->recv_at[p] = all;
    all += sluice_align_up(e->recv_bytes[p]);
  }
  SLUICE_TRY(reserve_staging(comm, &r->staging, all));
  uint64_t at = 0;
  for (int32_t p = 0; p < world_size; ++p) {
    if (r->host_recv[p] != NULL) recv[p] = r->staging.on_device + r->recv_at[p];
    if (send[p] == NULL || e->send_bytes[p] == 0 || where(comm, send[p]) == DEVICE) continue;
    memcpy(r->staging.pinned + at, send[p], e->send_bytes[p]);
    send[p] = r->staging.on_device + at;
    at += sluice_align_up(e->send_bytes[p]);
  }
  int code = sent == 0 ? 0
                       : comm->driver->cuMemcpyAsync(address(r->staging.on_device), address(r->staging.pinned), sent,
                                                     comm->stream);
  if (code != 0) return sluice_cuda_fail(comm->driver, code, "a header on its way to the device");
  const sluice_exchange_t on_device = {send, e->send_bytes, recv, e->recv_bytes};
  SLUICE_TRY(run_group(comm, &on_device, comm->stream));
  if (all > sent) {
    code = comm->driver->cuMemcpyAsync(address(r->staging.pinned + sent), address(r->staging.on_device + sent),
                                       all - sent, comm->stream);
  }
  if (code == 0) code = comm->driver->cuEventRecord(r->done, comm->stream);
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(comm->driver, code, "a header on its way from the device");
}

static uint64_t places_bytes(const nccl_comm_t* comm) {
  return (uint64_t)comm->base.world_size * (sizeof(const void*) + sizeof(void*));
}

static sluice_status_t nccl_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request) {
  nccl_comm_t* comm = downcast(base);
  sluice_comm_request_t* request = NULL;
  for (int i = 0; i < MAX_IN_FLIGHT && request == NULL; ++i) {
    if (!comm->requests[i].is_used) request = &comm->requests[i];
  }
  if (request == NULL) {
    return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, base->rank, -1, "rank %d started a third exchange, two are in flight",
                            base->rank);
  }
  const void** send = sluice_alloc(sluice_process_allocator(), places_bytes(comm), "nccl exchange");
  if (send == NULL) return SLUICE_E_NO_MEMORY;
  sluice_status_t status = sluice_cuda_enter(comm->device);
  if (status == SLUICE_OK) {
    status = leave_with(comm, run_staged(comm, request, exchange, send, (void**)(send + base->world_size)));
  }
  sluice_free(sluice_process_allocator(), send, places_bytes(comm));
  if (status != SLUICE_OK) return status;
  request->is_used = 1;
  *out_request = request;
  return SLUICE_OK;
}

static void take_received(const nccl_comm_t* comm, sluice_comm_request_t* request) {
  for (int32_t p = 0; p < comm->base.world_size; ++p) {
    if (request->host_recv[p] == NULL) continue;
    memcpy(request->host_recv[p], request->staging.pinned + request->recv_at[p], request->recv_bytes[p]);
  }
}

static sluice_status_t wait_inside(nccl_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns) {
  for (;;) {
    if (atomic_load(&comm->is_aborted)) return fail_aborted(comm);
    int code = comm->driver->cuEventQuery(request->done);
    if (code == 0) {
      if (comm->comm == NULL) return fail_aborted(comm); /* the stream was freed by an abort: nothing came */
      take_received(comm, request);
      return SLUICE_OK;
    }
    if (code != SLUICE_CU_NOT_READY) {
      sluice_status_t status = sluice_cuda_fail(comm->driver, code, "an exchange failed on the device");
      sluice_error_info_t why;
      sluice_error_capture(&why);
      abort_nccl(comm);
      (void)sluice_error_adopt(&why);
      return status;
    }
    int state = async_state(comm);
    if (state != 0 && state != SLUICE_NCCL_IN_PROGRESS) return fail(comm, state, "an exchange");
    if (sluice_now_ns() >= deadline_ns) return SLUICE_E_TIMED_OUT;
    nap();
  }
}

static sluice_status_t nccl_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                          int32_t* out_peer) {
  nccl_comm_t* comm = downcast(base);
  if (out_peer != NULL) *out_peer = -1;
  SLUICE_TRY(sluice_cuda_enter(comm->device));
  sluice_status_t status = wait_inside(comm, request, deadline_ns);
  if (status == SLUICE_E_TIMED_OUT) {
    (void)sluice_cuda_leave(comm->device);
    return status;
  }
  request->is_used = 0;
  return leave_with(comm, status);
}

static void nccl_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  abort_nccl(downcast(base));
  request->is_used = 0;
}

static void nccl_abort(sluice_comm_t* base) {
  nccl_comm_t* comm = downcast(base);
  atomic_store(&comm->is_aborted, 1);
  note_gone(comm, "aborted");
  abort_nccl(comm);
}

/* ---- registered buffers ---------------------------------------------------------------------------------------- */

/* Everybody's word to everybody, posted before the first exchange: nobody waits for it there. */
static sluice_status_t tell_word(nccl_comm_t* comm) {
  uint64_t world_size = (uint64_t)comm->base.world_size, bytes = world_size * 5 * sizeof(void*);
  comm->refusal = sluice_nccl_memory_refusal(&comm->nccl, comm->refusal_text, sizeof comm->refusal_text);
  if (comm->refusal == NULL && !comm->base.wants_memory) comm->refusal = "its slots are bounded or come from the host";
  comm->words[comm->base.rank] = comm->refusal == NULL;
  const void** at = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "nccl agreement");
  if (at == NULL) return SLUICE_E_NO_MEMORY;
  void** recv = (void**)(at + world_size);
  uint64_t* word_bytes = (uint64_t*)(void*)(at + 2 * world_size);
  for (int32_t p = 0; p < comm->base.world_size; ++p) {
    at[p] = &comm->words[comm->base.rank];
    recv[p] = &comm->words[p];
    word_bytes[p] = p == comm->base.rank ? 0 : sizeof *comm->words;
  }
  const sluice_exchange_t exchange = {at, word_bytes, recv, word_bytes};
  sluice_status_t status =
      run_staged(comm, &comm->requests[AGREEMENT], &exchange, at + 3 * world_size, (void**)(at + 4 * world_size));
  sluice_free(sluice_process_allocator(), at, bytes);
  return status;
}

/* What the ranks said; who asks has waited for an exchange that came later, so that this one is over. */
static sluice_status_t decide(nccl_comm_t* comm) {
  int32_t refuses = -1;
  sluice_status_t status = wait_inside(comm, &comm->requests[AGREEMENT], deadline_of(comm));
  if (status == SLUICE_E_TIMED_OUT) {
    abort_nccl(comm);
    return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->base.rank, -1,
                            "rank %d: nccl: the first exchange took longer than %.1f s: a rank is missing",
                            comm->base.rank, (double)comm->base.timeout_ns / 1e9);
  }
  SLUICE_TRY(status);
  for (int32_t p = comm->base.world_size - 1; p >= 0; --p) refuses = comm->words[p] == 0 ? p : refuses;
  comm->registers = refuses < 0 ? REGISTERED : UNREGISTERED;
  if (refuses < 0) return SLUICE_OK;
  const char* why = comm->refusal;
  sluice_log(SLUICE_LOG_INFO, "rank %d: nccl: exchanges go without registered buffers: rank %d has none%s%s",
             comm->base.rank, refuses, why != NULL ? "; here: " : "", why != NULL ? why : "");
  return SLUICE_OK;
}

static sluice_status_t take_registered(nccl_comm_t* comm, uint64_t bytes, sluice_nccl_block_t* block) {
  const char* what = NULL;
  int code = sluice_nccl_memory_take(&comm->nccl, &comm->mutex, &comm->comm, bytes, block, &what);
  if (atomic_load(&comm->is_aborted) && code != 0) return fail_aborted(comm);
  if (code != 0 && strcmp(what, "ncclMemAlloc") == 0) {
    return sluice_error_record(SLUICE_E_NO_MEMORY, comm->base.rank, -1, code,
                               "rank %d: nccl: %llu bytes of device memory for exchanges: %s (%d)", comm->base.rank,
                               (unsigned long long)bytes, comm->nccl.ncclGetErrorString(code), code);
  }
  if (code != 0) {
    return fail(comm, code, "a buffer cannot be registered (SLUICE_NCCL_REGISTER=0 on all ranks does without)");
  }
  return settle(comm, "the registration of a buffer", deadline_of(comm));
}

static sluice_status_t decide_and_take(nccl_comm_t* comm, uint64_t bytes, sluice_nccl_block_t* block) {
  if (comm->registers == UNDECIDED) SLUICE_TRY(decide(comm));
  return comm->registers == REGISTERED ? take_registered(comm, bytes, block) : SLUICE_OK;
}

static void nccl_release(sluice_comm_t* base, void* data);

static sluice_status_t nccl_allocate(sluice_comm_t* base, uint64_t bytes, void** out_data) {
  nccl_comm_t* comm = downcast(base);
  *out_data = NULL;
  if (!comm->is_ready) comm->base.wants_memory = 0; /* too early: no registered buffers at all */
  if (!comm->is_ready || comm->registers == UNREGISTERED) return SLUICE_OK;
  sluice_nccl_block_t* block = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *block, "nccl block");
  if (block == NULL) return SLUICE_E_NO_MEMORY;
  sluice_status_t status = sluice_cuda_enter(comm->device);
  if (status == SLUICE_OK) status = leave_with(comm, decide_and_take(comm, bytes, block));
  if (comm->comm == NULL) mark_broken(base, status);
  if (block->data == NULL) {
    sluice_free(sluice_process_allocator(), block, sizeof *block);
    return status;
  }
  block->next = comm->blocks;
  comm->blocks = block;
  if (status == SLUICE_OK) {
    *out_data = block->data;
    return SLUICE_OK;
  }
  sluice_error_info_t why;
  sluice_error_capture(&why);
  nccl_release(base, block->data);
  return sluice_error_adopt(&why);
}

static void nccl_release(sluice_comm_t* base, void* data) {
  nccl_comm_t* comm = downcast(base);
  sluice_nccl_block_t** at = &comm->blocks;
  while (*at != NULL && (*at)->data != data) at = &(*at)->next;
  sluice_nccl_block_t* block = *at;
  if (block == NULL || sluice_cuda_is_inherited(comm->device)) return;
  *at = block->next;
  int is_current = sluice_cuda_enter(comm->device) == SLUICE_OK;
  sluice_nccl_memory_give(&comm->nccl, comm->driver, &comm->mutex, &comm->comm, block);
  if (is_current) (void)sluice_cuda_leave(comm->device);
  sluice_free(sluice_process_allocator(), block, sizeof *block);
}

/* ---- create and destroy ---------------------------------------------------------------------------------------- */

/* In order where nothing is outstanding, by abort otherwise: both end in bounded time. */
static void end_nccl(nccl_comm_t* comm) {
  int32_t in_flight = comm->requests[0].is_used || comm->requests[1].is_used;
  if (comm->comm == NULL) return;
  if (in_flight || !comm->is_ready || atomic_load(&comm->base.broken) != SLUICE_OK) {
    abort_nccl(comm);
    return;
  }
  uint64_t deadline_ns = sluice_now_ns() + FINALIZE_WAIT_NS;
  int code = comm->nccl.ncclCommFinalize(comm->comm);
  while (code == SLUICE_NCCL_IN_PROGRESS && sluice_now_ns() < deadline_ns) {
    nap();
    code = async_state(comm);
  }
  if (code == 0) code = comm->nccl.ncclCommDestroy(comm->comm);
  if (code == 0) {
    comm->comm = NULL;
  } else {
    abort_nccl(comm);
  }
}

static void nccl_destroy(sluice_comm_t* base) {
  nccl_comm_t* comm = downcast(base);
  int is_current = sluice_cuda_enter(comm->device) == SLUICE_OK;
  note_gone(comm, "left");
  end_nccl(comm);
  for (int i = 0; i < NUM_REQUESTS; ++i) {
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
  downcast(base)->store.publish(downcast(base)->store.user, key, value);
}
static int32_t nccl_lookup(sluice_comm_t* base, const char* key, char* out, int32_t out_bytes) {
  return downcast(base)->store.lookup(downcast(base)->store.user, key, out, out_bytes);
}

static const sluice_comm_vtable_t nccl_vtable = {
    .destroy = nccl_destroy,
    .exchange_start = nccl_exchange_start,
    .exchange_wait = nccl_exchange_wait,
    .all_reduce_i64 = NULL,
    .abort = nccl_abort,
    .abandon = nccl_abandon,
    .exchange_enqueue = sluice_nccl_exchange_enqueue,
    .poll = sluice_nccl_poll,
    .allocate = nccl_allocate,
    .release = nccl_release,
    .is_capturable = 1,
};

static const sluice_comm_vtable_t nccl_vtable_with_store = {
    .destroy = nccl_destroy,
    .exchange_start = nccl_exchange_start,
    .exchange_wait = nccl_exchange_wait,
    .all_reduce_i64 = NULL,
    .abort = nccl_abort,
    .publish = nccl_publish,
    .lookup = nccl_lookup,
    .abandon = nccl_abandon,
    .exchange_enqueue = sluice_nccl_exchange_enqueue,
    .poll = sluice_nccl_poll,
    .allocate = nccl_allocate,
    .release = nccl_release,
    .is_capturable = 1,
};

static sluice_status_t allocate_arrays(nccl_comm_t* comm) {
  uint64_t world_size = (uint64_t)comm->base.world_size;
  comm->arrays_bytes = world_size * (NUM_REQUESTS * (sizeof(void*) + 2 * sizeof(uint64_t)) + sizeof(int32_t));
  char* at = sluice_alloc_zeroed(sluice_process_allocator(), comm->arrays_bytes, "nccl requests");
  if (at == NULL) return SLUICE_E_NO_MEMORY;
  for (int i = 0; i < NUM_REQUESTS; ++i) {
    comm->requests[i].host_recv = (void**)(void*)at;
    comm->requests[i].recv_bytes = (uint64_t*)(void*)(at + world_size * sizeof(void*));
    comm->requests[i].recv_at = comm->requests[i].recv_bytes + world_size;
    at += world_size * (sizeof(void*) + 2 * sizeof(uint64_t));
  }
  comm->words = (int32_t*)(void*)at;
  return SLUICE_OK;
}

static sluice_status_t open_inside(nccl_comm_t* comm, const sluice_nccl_options_t* options) {
  int least = 0, greatest = 0;
  int code = comm->driver->cuCtxGetStreamPriorityRange(&least, &greatest);
  if (code == 0)
    code = comm->driver->cuStreamCreateWithPriority(&comm->stream, SLUICE_CU_STREAM_NON_BLOCKING, greatest);
  for (int i = 0; i < NUM_REQUESTS && code == 0; ++i) {
    code = comm->driver->cuEventCreate(&comm->requests[i].done, SLUICE_CU_EVENT_DISABLE_TIMING);
  }
  if (code != 0) return sluice_cuda_fail(comm->driver, code, "no stream or event for nccl");
  sluice_nccl_config_t config = {
      .size = sizeof config, .magic = SLUICE_NCCL_MAGIC, .version = SLUICE_NCCL_CONFIG_VERSION, .blocking = 0};
  void* made = NULL;
  code = options->parent != NULL
             ? comm->nccl.ncclCommSplit(options->parent, options->color, comm->base.rank, &made, &config)
             : comm->nccl.ncclCommInitRankConfig(&made, comm->base.world_size, *options->id, comm->base.rank, &config);
  comm->comm = made;
  if (code == 0 || code == SLUICE_NCCL_IN_PROGRESS) return SLUICE_OK;
  return fail(comm, code, "the group cannot be made");
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
  comm->registers = options->may_register && c.world_size > 1 ? UNDECIDED : UNREGISTERED;
  pthread_mutex_init(&comm->mutex, NULL);
  status = allocate_arrays(comm);
  if (status != SLUICE_OK) goto err_destroy;
  status = sluice_cuda_enter(comm->device);
  if (status != SLUICE_OK) goto err_destroy;
  status = leave_with(comm, open_inside(comm, options));
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

sluice_status_t sluice_nccl_make_id(const sluice_nccl_symbols_t* symbols, sluice_nccl_id_t* out_id) {
  int code = symbols->ncclGetUniqueId(out_id);
  if (code == 0) return SLUICE_OK;
  return sluice_error_record(SLUICE_E_FOREIGN, -1, -1, code, "nccl: no id for a group: %s (%d)",
                             symbols->ncclGetErrorString(code), code);
}

sluice_status_t sluice_nccl_check_version(const sluice_nccl_symbols_t* symbols) {
  int version = 0;
  int code = symbols->ncclGetVersion(&version);
  if (code != 0) {
    return sluice_error_record(SLUICE_E_FOREIGN, -1, -1, code, "nccl: it does not tell its version (%d)", code);
  }
  if (version >= SLUICE_NCCL_MIN_VERSION) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "nccl: version %d is too old, Sluice needs 2.18.0 (21800) or later", version);
}

sluice_status_t sluice_nccl_open(const char* library, sluice_nccl_symbols_t* out_symbols) {
  memset(out_symbols, 0, sizeof *out_symbols);
  const char* name = library != NULL ? library : "libnccl.so.2";
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == NULL) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == NULL) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "nccl: no library: %s; install NCCL 2.18 or later, or give its path",
                       dlerror());
  }
#define SYMBOL(result, name_, parameters)                                                                        \
  *(void**)&out_symbols->name_ = dlsym(handle, #name_);                                                          \
  if (out_symbols->name_ == NULL) {                                                                              \
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "nccl: %s has no symbol " #name_ ": Sluice needs NCCL 2.18 or later", \
                       name);                                                                                    \
  }
#include "backend/comm/nccl/nccl_symbols.inc"
#undef SYMBOL
#define SYMBOL(result, name_, parameters) *(void**)&out_symbols->name_ = dlsym(handle, #name_);
#include "backend/comm/nccl/nccl_register_symbols.inc"
#undef SYMBOL
  return sluice_nccl_check_version(out_symbols);
}
