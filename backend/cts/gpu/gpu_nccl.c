// SPDX-License-Identifier: Apache-2.0
/* NCCL with one rank, since there is one GPU: loading, creation from an id and from the host's communicator, a
 * registered block, destroy and abort. Exchanges between ranks need two GPUs (integration_tests/gpu/torch_gpu.py,
 * `ranks`). */
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/comm/nccl/nccl_comm.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/comm/nccl/fake/fake_nccl.h"
#endif

enum { BYTES = 1 << 20 };
#define TIMEOUT_NS (UINT64_C(60) * 1000000000)

static int open_nccl(sluice_nccl_symbols_t* out_symbols) {
#ifdef SLUICE_GPU_SUITE_FAKE
  *out_symbols = sluice_fake_nccl();
  return 1;
#else
  if (sluice_nccl_open(NULL, out_symbols) == SLUICE_OK) return 1;
  printf("     left out: %s\n", last_message());
  return 0;
#endif
}

static const char* problem_of(sluice_status_t status) { return status == SLUICE_OK ? NULL : last_message(); }

/* Creates a communicator from a new id, or from `parent`. */
static sluice_status_t make(const sluice_nccl_symbols_t* nccl, void* parent, sluice_comm_t** out_comm) {
  sluice_nccl_id_t id;
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = 0, config.world_size = 1, config.timeout_ns = TIMEOUT_NS;
  *out_comm = NULL;
  if (parent == NULL) SLUICE_TRY(sluice_nccl_make_id(nccl, &id));
  const sluice_nccl_options_t options = {.symbols = nccl,
                                         .device = gpu_rig.device,
                                         .memory = &gpu_rig.memory,
                                         .id = parent == NULL ? &id : NULL,
                                         .parent = parent};
  return sluice_nccl_comm_create(&options, &config, out_comm);
}

/* An exchange without peers: the group starts, NCCL accepts a group of calls without a call, and nothing fails. */
static sluice_status_t use(sluice_comm_t* comm) {
  const void* send[1] = {NULL};
  void* recv[1] = {NULL};
  const uint64_t none[1] = {0};
  const sluice_exchange_t exchange = {send, none, recv, none};
  SLUICE_TRY(sluice_comm_exchange_enqueue(comm, &exchange, NULL));
  return sluice_comm_poll(comm);
}

static sluice_status_t make_and_use(const sluice_nccl_symbols_t* nccl, void* parent) {
  sluice_comm_t* comm = NULL;
  SLUICE_TRY(make(nccl, parent, &comm));
  sluice_status_t status = use(comm);
  sluice_error_info_t why;
  if (status != SLUICE_OK) sluice_error_capture(&why);
  sluice_comm_destroy(comm);
  return status == SLUICE_OK ? SLUICE_OK : sluice_error_adopt(&why);
}

/* The host's communicator, once it has started. NULL: it did not. */
static void* open_host(const sluice_nccl_symbols_t* nccl, int blocking) {
  sluice_nccl_id_t id;
  sluice_nccl_config_t config = sluice_nccl_config(blocking);
  const struct timespec nap = {.tv_nsec = 1000000};
  static void* host; /* NCCL may fill it in later */
  host = NULL;
  if (sluice_nccl_make_id(nccl, &id) != SLUICE_OK) return NULL;
  int code = nccl->ncclCommInitRankConfig(&host, 1, id, 0, &config);
  for (uint64_t end_ns = sluice_now_ns() + TIMEOUT_NS; code == SLUICE_NCCL_IN_PROGRESS;) {
    int state = 0;
    nanosleep(&nap, NULL);
    code = nccl->ncclCommGetAsyncError(host, &state);
    if (code == 0) code = state;
    if (sluice_now_ns() > end_ns) return NULL;
  }
  return code == 0 ? host : NULL;
}

static void split(const sluice_nccl_symbols_t* nccl, int blocking) {
  void* host = open_host(nccl, blocking);
  gpu_report(blocking ? "a host's communicator" : "a host's communicator that does not block",
             host != NULL ? NULL : "does not start");
  if (host == NULL) return;
  gpu_report("one that is split from it", problem_of(make_and_use(nccl, host)));
  int code = nccl->ncclCommAbort(host);
  gpu_report("and the host's is free again", code == 0 || code == SLUICE_NCCL_IN_PROGRESS ? NULL : "cannot be ended");
}

/* Memory of the communicator itself, if NCCL registers any. */
static void registered(sluice_comm_t* comm) {
  void* block = NULL;
  const char* refusal = comm->vtable->memory_refusal(comm);
  if (refusal != NULL) {
    printf("     no registered buffers: %s\n", refusal);
    return;
  }
  sluice_status_t status = comm->vtable->allocate(comm, BYTES, &block);
  gpu_report("a registered block", problem_of(status));
  if (status != SLUICE_OK) return;
  int code = gpu_rig.driver->cuMemsetD8Async((unsigned long long)(uintptr_t)block, 1, BYTES, NULL);
  if (code == 0) code = gpu_rig.driver->cuStreamSynchronize(NULL);
  gpu_report("is the device's memory", code == 0 ? NULL : "cannot be written");
  comm->vtable->release(comm, block);
}

void gpu_part_nccl(void) {
  sluice_nccl_symbols_t nccl;
  sluice_comm_t* comm = NULL;
  int version = 0;
  if (!open_nccl(&nccl)) {
    gpu_report("NCCL is left out", NULL);
    return;
  }
  if (nccl.ncclGetVersion(&version) == 0) printf("     NCCL %d\n", version);
  sluice_status_t status = make(&nccl, NULL, &comm);
  if (status == SLUICE_OK) status = use(comm);
  gpu_report("a communicator by an id", problem_of(status));
  if (status == SLUICE_OK) registered(comm);
  if (status == SLUICE_OK) {
    sluice_comm_abort(comm);
    gpu_report("is aborted", sluice_comm_poll(comm) == SLUICE_E_ABORTED ? NULL : "and does not say so");
  }
  sluice_comm_destroy(comm);
  gpu_report("and another follows", problem_of(make_and_use(&nccl, NULL)));
  for (int blocking = 0; blocking <= !GPU_IS_FAKE; ++blocking) split(&nccl, blocking);
}
