// SPDX-License-Identifier: Apache-2.0
/* Creates and destroys an NCCL communicator. */
#include "backend/base/clock.h"
#include "backend/base/text.h"
#include "backend/comm/nccl/nccl_state.h"
#include "backend/comm/tcp/tcp_side_channel.h"

#define FINALIZE_WAIT_NS UINT64_C(2000000000)

/* Finalizes the communicator if no request is outstanding, and aborts it otherwise. Both end in bounded time. */
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
  /* A communicator that NCCL destroys in the background must not be aborted as well: that would free it twice. */
  if (code == 0 && sluice_nccl_is_taken(comm->nccl.ncclCommDestroy(comm->comm))) {
    comm->comm = NULL;
  } else {
    sluice_nccl_abort_group(comm);
  }
}

static uint64_t received_bytes(const nccl_comm_t* comm) {
  return SLUICE_MAX_IN_FLIGHT * (uint64_t)comm->base.world_size * sizeof(received_t);
}

static void nccl_destroy(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  int is_current = sluice_cuda_enter(comm->device) == SLUICE_OK;
  sluice_nccl_note_gone(comm, "left");
  sluice_nccl_headers_close(comm);
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
  sluice_free(sluice_process_allocator(), comm->requests[0].received, received_bytes(comm));
  sluice_nccl_forget_posted(comm);
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

static void nccl_abort(sluice_comm_t* base) {
  nccl_comm_t* comm = sluice_nccl_downcast(base);
  atomic_store(&comm->is_aborted, 1);
  sluice_nccl_note_gone(comm, "aborted");
  sluice_nccl_abort_group(comm);
}

static const sluice_comm_vtable_t nccl_vtable = {
    .destroy = nccl_destroy,
    .exchange_start = sluice_nccl_exchange_start,
    .headers_start = sluice_nccl_headers_start,
    .exchange_wait = sluice_nccl_exchange_wait,
    .abort = nccl_abort,
    .publish = nccl_publish,
    .lookup = nccl_lookup,
    .abandon = sluice_nccl_abandon,
    .exchange_enqueue = sluice_nccl_exchange_enqueue,
    .group_begin = sluice_nccl_group_begin,
    .group_end = sluice_nccl_group_end,
    .poll = sluice_nccl_poll,
    .memory_refusal = sluice_nccl_refusal_of_memory,
    .allocate = sluice_nccl_allocate,
    .release = sluice_nccl_release,
    .is_capturable = 1,
    .messages_open = sluice_tcp_open_side_channel,
};

static sluice_status_t allocate_received(nccl_comm_t* comm) {
  received_t* received = sluice_alloc_zeroed(sluice_process_allocator(), received_bytes(comm), "nccl requests");
  if (received == NULL) return sluice_alloc_status();
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    comm->requests[i].received = received + (int64_t)i * comm->base.world_size;
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
  sluice_nccl_config_t config = sluice_nccl_config(0);
  SLUICE_TRY(sluice_read_environment("SLUICE_NCCL_MAX_CTAS", 1, SLUICE_NCCL_MOST_CTAS, &config.maxCTAs));
  if (options->parent != NULL) return sluice_nccl_split(comm, options->parent, options->color, &config);
  code = comm->nccl.ncclCommInitRankConfig(&comm->comm, comm->base.world_size, *options->id, comm->base.rank, &config);
  if (sluice_nccl_is_taken(code)) return SLUICE_OK;
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
    if (comm == NULL) status = sluice_alloc_status();
  }
  if (status != SLUICE_OK) {
    if (options->released != NULL) options->released(options->released_user);
    return status;
  }
  comm->released = options->released;
  comm->released_user = options->released_user;
  if (options->store != NULL) comm->store = *options->store;
  comm->open_headers = options->open_headers != NULL ? options->open_headers : sluice_tcp_open_headers;
  comm->vtable = nccl_vtable;
  if (options->store == NULL) comm->vtable.publish = NULL, comm->vtable.lookup = NULL;
  sluice_comm_init_base(&comm->base, &comm->vtable, "nccl", &c);
  comm->nccl = *options->symbols;
  comm->device = options->device;
  comm->driver = sluice_cuda_device_driver(options->device);
  comm->memory = options->memory;
  pthread_mutex_init(&comm->mutex, NULL);
  status = allocate_received(comm);
  if (status != SLUICE_OK) goto err_destroy;
  status = sluice_cuda_enter(comm->device);
  if (status != SLUICE_OK) goto err_destroy;
  status = sluice_cuda_leave_with(comm->device, open_inside(comm, options));
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
