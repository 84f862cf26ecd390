// SPDX-License-Identifier: Apache-2.0
/* Implements device/device_memory.h for CUDA. */
#include <string.h>

#include "backend/device/cuda/cuda_state.h"

static sluice_status_t wait_for_end(sluice_device_t* device, sluice_stream_t stream) {
  const sluice_cuda_memory_state_t* device_memory = sluice_cuda_memory_state(device);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  if (!device_memory->has_end) return SLUICE_OK;
  int code = driver->cuStreamWaitEvent(stream, device_memory->end, 0);
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "a stream cannot wait for the pass before");
}

/* A capture may not wait for events recorded before it: the host orders the graph's launch after them. */
static sluice_status_t open_inside(sluice_device_t* device, sluice_stream_t stream) {
  sluice_cuda_memory_state_t* device_memory = sluice_cuda_memory_state(device);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  int state = SLUICE_CU_CAPTURE_NONE;
  device_memory->captured = 0;
  SLUICE_TRY(sluice_cuda_check_stream(device, stream));
  int code = driver->cuStreamIsCapturing(stream, &state);
  if (code != 0) return sluice_cuda_fail(driver, code, "the state of stream %p is unknown", stream);
  device_memory->captured = state != SLUICE_CU_CAPTURE_NONE;
  if (device_memory->captured) return sluice_cuda_check_joined(device);
  SLUICE_TRY(sluice_cuda_rejoin(device, stream));
  return wait_for_end(device, stream);
}

static sluice_status_t memory_open(sluice_device_t* device, sluice_stream_t stream, int32_t* out_captured) {
  *out_captured = 0;
  SLUICE_TRY(sluice_cuda_enter(device));
  SLUICE_TRY(sluice_cuda_leave_with(device, open_inside(device, stream)));
  *out_captured = sluice_cuda_memory_state(device)->captured;
  return SLUICE_OK;
}

static void init_memory(sluice_device_t* device, sluice_allocate_fn_t allocate, sluice_free_fn_t release, void* user,
                        sluice_allocator_t* out_memory) {
  if (allocate != NULL) {
    sluice_allocator_init(out_memory, allocate, release, user);
  } else {
    sluice_cuda_allocator_init(device, out_memory);
  }
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

/* A copy into pageable memory would use the driver's own staging, which first waits for every stream. */
static sluice_status_t reserve_pinned(sluice_device_t* device, uint64_t bytes) {
  sluice_cuda_memory_state_t* device_memory = sluice_cuda_memory_state(device);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  if (bytes <= device_memory->pinned_bytes) return SLUICE_OK;
  bytes = sluice_align_up(bytes);
  if (device_memory->pinned != NULL) (void)driver->cuMemFreeHost(device_memory->pinned);
  device_memory->pinned = NULL;
  device_memory->pinned_bytes = 0;
  int code = driver->cuMemHostAlloc(&device_memory->pinned, bytes, SLUICE_CU_MEMHOSTALLOC_PORTABLE);
  if (code != 0) {
    device_memory->pinned = NULL;
    return sluice_cuda_fail(driver, code, "%llu bytes of pinned host memory for counts", (unsigned long long)bytes);
  }
  device_memory->pinned_bytes = bytes;
  return SLUICE_OK;
}

static sluice_status_t memory_read(sluice_device_t* device, sluice_stream_t stream, const void* data, void* out,
                                   uint64_t bytes) {
  if (bytes == 0) return SLUICE_OK;
  SLUICE_TRY(sluice_cuda_enter(device));
  SLUICE_TRY(sluice_cuda_leave_with(device, reserve_pinned(device, bytes)));
  void* pinned = sluice_cuda_memory_state(device)->pinned;
  SLUICE_TRY(sluice_cuda_read(device, stream, data, pinned, bytes));
  memcpy(out, pinned, bytes);
  return SLUICE_OK;
}

/* ---- blocks ---------------------------------------------------------------------------------------------------- */

static sluice_status_t take(sluice_device_t* device, sluice_stream_t stream, sluice_allocator_t* memory, int32_t pinned,
                            uint64_t bytes, uint64_t most_bytes, void** out_data) {
  sluice_cuda_memory_state_t* state = sluice_cuda_memory_state(device);
  sluice_pinned_pool_t** pool = &state->pools[pinned != 0];
  sluice_pinned_block_t block;
  *out_data = NULL;
  if (*pool == NULL && state->captured) {
    return SLUICE_FAIL(
        SLUICE_E_STATE,
        "cuda: no block of %llu bytes was allocated before the capture: run the same call once outside of it first",
        (unsigned long long)bytes);
  }
  if (*pool == NULL) {
    const uint64_t limit = state->pinned_limit > 0 ? state->pinned_limit : UINT64_MAX;
    SLUICE_TRY(pinned ? sluice_pinned_pool_create(device, limit, pool)
                      : sluice_device_pool_create(device, memory, pool));
  }
  SLUICE_TRY(state->captured ? sluice_pinned_pool_take_idle(*pool, bytes, &block)
                             : sluice_pinned_pool_take(*pool, bytes, most_bytes, stream, &block));
  *out_data = block.data;
  return SLUICE_OK;
}

/* The host's stream may have been destroyed, so a stream of ours waits for the last pass instead. */
static void give(sluice_device_t* device, int32_t pinned, void* data) {
  sluice_pinned_pool_t* pool = sluice_cuda_memory_state(device)->pools[pinned != 0];
  if (data == NULL || pool == NULL || sluice_cuda_is_inherited(device)) return;
  if (sluice_cuda_memory_state(device)->captured) return; /* the graph uses it at every launch */
  sluice_stream_t own = sluice_cuda_cast(device)->lanes[SLUICE_LANE_COPY_OUT];
  if (sluice_cuda_enter(device) == SLUICE_OK) {
    (void)wait_for_end(device,
                       own); /* if the driver refuses this, it also refuses the record below, which then waits */
    (void)sluice_cuda_leave(device);
  }
  (void)sluice_pinned_pool_give_at(pool, data, own);
}

static uint64_t idle_bytes(const sluice_device_t* device) {
  const sluice_pinned_pool_t* pool = sluice_cuda_memory_state((sluice_device_t*)device)->pools[0];
  return pool == NULL ? 0 : sluice_pinned_pool_idle_bytes(pool);
}

static void limit_pinned(sluice_device_t* device, uint64_t bytes) {
  sluice_cuda_memory_state_t* state = sluice_cuda_memory_state(device);
  state->pinned_limit = bytes;
  if (state->pools[1] != NULL) sluice_pinned_pool_set_limit(state->pools[1], bytes > 0 ? bytes : UINT64_MAX);
}

static void drop_pools(sluice_device_t* device) {
  sluice_cuda_memory_state_t* device_memory = sluice_cuda_memory_state(device);
  for (int i = 0; i < 2; ++i) {
    sluice_pinned_pool_destroy(device_memory->pools[i]);
    device_memory->pools[i] = NULL;
  }
}

void sluice_cuda_memory_release(sluice_device_t* device) {
  sluice_cuda_memory_state_t* device_memory = sluice_cuda_memory_state(device);
  drop_pools(device);
  if (device_memory->pinned != NULL) (void)sluice_cuda_device_driver(device)->cuMemFreeHost(device_memory->pinned);
  device_memory->pinned = NULL;
}

const sluice_device_memory_t sluice_cuda_memory = {
    .open = memory_open,
    .check_memory = sluice_cuda_check_memory,
    .init_memory = init_memory,
    .fill = sluice_cuda_fill,
    .copy = sluice_cuda_copy,
    .read = memory_read,
    .take = take,
    .give = give,
    .idle_bytes = idle_bytes,
    .limit_pinned = limit_pinned,
    .describe = sluice_cuda_device_name,
    .release = drop_pools,
    .fork_stream = sluice_cuda_fork_stream,
    .join_stream = sluice_cuda_join_stream,
    .routing = &sluice_cuda_routing_kernels,
    .clock = &sluice_cuda_clock,
    .adam = &sluice_cuda_adam_kernels,
};
