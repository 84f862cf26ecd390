// SPDX-License-Identifier: Apache-2.0
/* Tests dry steps: their records, an additional call that a record shows, and refused requests. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/fake_record.h"
#include "capi/dry_step/dry_step.h"

static const sluice_dry_step_t small = {.ranks = 2,
                                        .tokens = 64,
                                        .model_width = 32,
                                        .hidden_width = 16,
                                        .experts = 4,
                                        .top_k = 2,
                                        .chunks = 1,
                                        .seed = 7,
                                        .device_bytes = (int64_t)1 << 40};

/* Returns the record as text, which the caller frees. Fails the test if the step fails. */
static char* record_of(const sluice_dry_step_t* step) {
  char* text = NULL;
  size_t bytes = 0;
  FILE* out = open_memstream(&text, &bytes);
  const sluice_status_t status = sluice_dry_step_run(step, out);
  fclose(out);
  if (status != SLUICE_OK) fail_msg("%d: %s", status, last_message());
  return text;
}

static int64_t count_after(const sluice_dry_step_t* step, sluice_fake_event_kind_t kind) {
  free(record_of(step));
  return sluice_fake_cuda_recorded(kind);
}

TEST(DryStep_TheSameTwice_IsTheSameRecord) {
  sluice_dry_step_t one = small;
  one.ranks = 1;
  char *first = record_of(&one), *second = record_of(&one);
  assert_string_equal(first, second);
  assert_non_null(strstr(first, "\"forward\""));
  assert_non_null(strstr(first, "\"sluice_route_count\", 1, 128, ")); /* one tile with all routes */
  /* After the settling steps nothing is allocated, and no event is made. */
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_HOST_CALL), 0);
  free(first);
  free(second);
}

/* ---- an additional call, once on each rank in the recorded step ------------------------------------------------ */

static const sluice_cuda_driver_t* driver;
static sluice_nccl_symbols_t nccl;
static sluice_cuda_driver_t altered_driver;
static sluice_nccl_symbols_t altered_nccl;
static _Thread_local int is_planted; /* a phase has threads of its own */

static int plants(void) {
  sluice_fake_cuda_lock();
  const int is_due = sluice_fake_is_recorded() && !is_planted;
  sluice_fake_cuda_unlock();
  is_planted |= is_due;
  return is_due;
}

static int launch(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,
                  unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, void* stream,
                  void** parameters, void** extra) {
  for (int more = plants(); more > 0; --more) {
    (void)driver->cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                                 parameters, extra);
  }
  return driver->cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                                parameters, extra);
}

static int synchronize(void* event) {
  if (plants()) (void)driver->cuEventSynchronize(event);
  return driver->cuEventSynchronize(event);
}

static int wait_for_event(void* stream, void* event, unsigned int flags) {
  if (plants()) (void)driver->cuStreamWaitEvent(stream, event, flags);
  return driver->cuStreamWaitEvent(stream, event, flags);
}

/* After a group, runs another group that exchanges a byte with the peer of the last message. */
static _Thread_local struct {
  int type, peer;
  void *comm, *stream;
} last;
static _Thread_local char bytes[2];

static int send(const void* data, size_t count, int type, int peer, void* comm, void* stream) {
  last.type = type, last.peer = peer, last.comm = comm, last.stream = stream;
  return nccl.ncclSend(data, count, type, peer, comm, stream);
}

static int end_group(void) {
  const int code = nccl.ncclGroupEnd();
  if (code != 0 || !plants()) return code;
  (void)nccl.ncclGroupStart();
  (void)nccl.ncclSend(&bytes[0], 1, last.type, last.peer, last.comm, last.stream);
  (void)nccl.ncclRecv(&bytes[1], 1, last.type, last.peer, last.comm, last.stream);
  return nccl.ncclGroupEnd();
}

/* Before the first exchange of headers, makes another one on the same connections. */
static sluice_status_t (*open_recorded)(sluice_comm_t* comm, sluice_comm_t** out_tcp);
static sluice_status_t (*start_recorded)(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                         sluice_comm_request_t** out_request);
static sluice_comm_vtable_t altered_headers;

static sluice_status_t start_header(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                    sluice_comm_request_t** out_request) {
  sluice_comm_request_t* more = NULL;
  if (plants()) {
    sluice_status_t status = start_recorded(comm, exchange, &more);
    if (status == SLUICE_OK) status = comm->vtable->exchange_wait(comm, more, UINT64_MAX, NULL);
    if (status != SLUICE_OK) return status;
  }
  return start_recorded(comm, exchange, out_request);
}

static sluice_status_t open_headers(sluice_comm_t* comm, sluice_comm_t** out_tcp) {
  const sluice_status_t status = open_recorded(comm, out_tcp);
  if (status != SLUICE_OK) return status;
  sluice_fake_cuda_lock();
  start_recorded = (*out_tcp)->vtable->exchange_start;
  altered_headers = *(*out_tcp)->vtable;
  altered_headers.exchange_start = start_header;
  (*out_tcp)->vtable = &altered_headers;
  sluice_fake_cuda_unlock();
  return SLUICE_OK;
}

static void plant_header(sluice_cuda_sources_t* sources) {
  open_recorded = sources->open_headers;
  sources->open_headers = open_headers;
}
static void plant_launch(sluice_cuda_sources_t* sources) {
  altered_driver.cuLaunchKernel = launch;
  sources->driver = &altered_driver;
}
static void plant_host_wait(sluice_cuda_sources_t* sources) {
  altered_driver.cuEventSynchronize = synchronize;
  sources->driver = &altered_driver;
}
static void plant_wait(sluice_cuda_sources_t* sources) {
  altered_driver.cuStreamWaitEvent = wait_for_event;
  sources->driver = &altered_driver;
}
static void plant_group(sluice_cuda_sources_t* sources) {
  altered_nccl.ncclSend = send, altered_nccl.ncclGroupEnd = end_group;
  sources->nccl = &altered_nccl;
}

TEST(DryStep_PlantedCall_IsOneMoreOnEachRankAndNothingElse) {
  const struct {
    const char* what;
    void (*alter)(sluice_cuda_sources_t* sources);
    sluice_fake_event_kind_t kind;
  } planted[] = {
      {"launch", plant_launch, SLUICE_FAKE_LAUNCH},       {"host wait", plant_host_wait, SLUICE_FAKE_HOST_WAIT},
      {"wait of a stream", plant_wait, SLUICE_FAKE_WAIT}, {"group", plant_group, SLUICE_FAKE_MESSAGES},
      {"header", plant_header, SLUICE_FAKE_HEADER},
  };
  int64_t before[SLUICE_FAKE_MARK + 1];
  free(record_of(&small));
  for (int kind = 0; kind <= SLUICE_FAKE_MARK; ++kind) before[kind] = sluice_fake_cuda_recorded(kind);
  assert_int_equal(before[SLUICE_FAKE_MESSAGES], 2 * 5);
  assert_int_equal(before[SLUICE_FAKE_HOST_WAIT], 2);
  assert_int_equal(before[SLUICE_FAKE_HEADER], 2 * 2);
  for (size_t i = 0; i < sizeof planted / sizeof planted[0]; ++i) {
    sluice_dry_step_t step = small;
    driver = sluice_fake_cuda_driver();
    nccl = sluice_fake_nccl();
    altered_driver = *driver, altered_nccl = nccl;
    step.alter = planted[i].alter;
    free(record_of(&step));
    for (int kind = 0; kind <= SLUICE_FAKE_MARK; ++kind) {
      const int64_t want = before[kind] + (kind == (int)planted[i].kind ? small.ranks : 0);
      if (sluice_fake_cuda_recorded(kind) == want) continue;
      fail_msg("%s planted: %lld events of kind %d, wanted %lld", planted[i].what,
               (long long)sluice_fake_cuda_recorded(kind), kind, (long long)want);
    }
  }
}

/* ---- refusals --------------------------------------------------------------------------------------------------- */

static void refuses(sluice_dry_step_t step, sluice_status_t want, const char* words) {
  char text[16];
  FILE* out = fmemopen(text, sizeof text, "w");
  const sluice_status_t status = sluice_dry_step_run(&step, out);
  fclose(out);
  if (status != want || strstr(last_message(), words) == NULL) {
    fail_msg("%d: %s; wanted %d: ..%s..", status, status == SLUICE_OK ? "" : last_message(), want, words);
  }
}

TEST(DryStep_WhatItCannotHold_IsRefusedByNameWithTheRemedy) {
  sluice_dry_step_t step = small;
  step.ranks = 9;
  refuses(step, SLUICE_E_INVALID_ARGUMENT, "ranks is 9; it must be from 1 to 8");
  step = small, step.top_k = 5;
  refuses(step, SLUICE_E_INVALID_ARGUMENT, "top_k is 5; it must be from 1 to 4");
  step = small, step.ranks = 3;
  refuses(step, SLUICE_E_INVALID_ARGUMENT, "4 experts do not divide over 3 ranks");
  step = small, step.device_bytes = 8192;
  refuses(step, SLUICE_E_NO_MEMORY, "and the device has 8192");
  refuses(step, SLUICE_E_NO_MEMORY, "ask for more ranks or fewer tokens");
  /* The host's tensors fit, the engine's slots do not: cuBLAS's workspace alone takes 32 MiB. */
  step = small, step.device_bytes = 1 << 20;
  refuses(step, SLUICE_E_NO_MEMORY, "does not hold this layer");
  refuses(step, SLUICE_E_NO_MEMORY, "ask for more ranks or fewer tokens");
  free(record_of(&small)); /* a refused request leaves no state */
}

TEST(DryStep_MoreExperts_TakeNoMoreLaunchesOrGroups) {
  sluice_dry_step_t step = small;
  step.tokens = 2048;
  const int64_t launches = count_after(&step, SLUICE_FAKE_LAUNCH),
                groups = sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES);
  step.experts = 64;
  assert_int_equal(count_after(&step, SLUICE_FAKE_LAUNCH), launches);
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES), groups);
}

/* Launches pack tokens, output gradients, and tokens again. Each reads a token's row once for all ranks. */
TEST(DryStep_DeduplicatedLayer_PacksCopiesByOneLaunch) {
  sluice_dry_step_t step = small;
  int64_t launches = 0;
  step.ranks = 4, step.tokens = 2048, step.experts = 16, step.deduplicate = SLUICE_DEDUPLICATE_RANKS;
  char* text = record_of(&step);
  for (const char* at = text; (at = strstr(at, "\"sluice_scatter_rows\"")) != NULL; ++at) ++launches;
  free(text);
  assert_int_equal(launches, 3 * step.ranks);
  /* And unpacks them by one launch. */
  launches = sluice_fake_cuda_recorded(SLUICE_FAKE_LAUNCH);
  step.experts = 64;
  assert_int_equal(count_after(&step, SLUICE_FAKE_LAUNCH), launches);
}

/* Gradients of gate and up that are one matrix take one GEMM in either layout. */
TEST(DryStep_TransposedExperts_TakeNoMoreGemms) {
  sluice_dry_step_t step = small;
  const int64_t gemms = count_after(&step, SLUICE_FAKE_GEMM);
  step.is_transposed = 1;
  assert_int_equal(count_after(&step, SLUICE_FAKE_GEMM), gemms);
}

TEST(DryStep_MoreChunks_AreMoreOfEverythingButReads) {
  sluice_dry_step_t step = small;
  const int64_t launches = count_after(&step, SLUICE_FAKE_LAUNCH),
                groups = sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES);
  const int64_t reads = sluice_fake_cuda_recorded(SLUICE_FAKE_HOST_WAIT);
  step.chunks = 4;
  assert_true(count_after(&step, SLUICE_FAKE_LAUNCH) > 3 * launches);
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES), groups + 2 * 3 * 5);
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_HOST_WAIT), reads);
}
