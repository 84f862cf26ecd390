// SPDX-License-Identifier: Apache-2.0
/* One exchange whose data identifies its origin. */
#pragma once

#include "backend/cts/comm/comm_suite_case.h"

typedef uint64_t (*cts_size_fn_t)(int32_t source, int32_t target, int32_t index);

typedef struct cts_exchange_pair_s {
  sluice_comm_request_t* request;
  int32_t index;
  cts_size_fn_t size;
  const void* send[MAX_WORLD_SIZE];
  void* recv[MAX_WORLD_SIZE];
  uint64_t send_bytes[MAX_WORLD_SIZE];
  uint64_t recv_bytes[MAX_WORLD_SIZE];
} cts_exchange_t;

uint64_t cts_uneven_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_one_sided_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_zero_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_large_size(int32_t source, int32_t target, int32_t index);
/* More than a transport sends eagerly, yet filled in much less than SHORT_NS. */
uint64_t cts_medium_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_small_size(int32_t source, int32_t target, int32_t index);

/* Starts exchange `index`. The entry of the own rank must not be read: it is invalid. */
sluice_status_t cts_start(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size, cts_exchange_t* e);
void cts_release(cts_exchange_t* e);
/* Waits, checks, releases. If the wait fails, returns its status. */
sluice_status_t cts_finish(cts_rank_t* me, sluice_comm_t* comm, cts_exchange_t* e);
sluice_status_t cts_run_exchange(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size);
