// SPDX-License-Identifier: Apache-2.0
/* Device memory as an allocator, and a bounded pool of pinned host memory for offload. */
#pragma once

#include "backend/device/cuda/cuda_device.h"

/* Blocks of device memory, counted like any others; for an arena of slots, not for many small ones (cuMemFree waits for
 * the device). Only sluice_alloc and sluice_free: the host cannot access the memory, so never sluice_alloc_zeroed.
 * `device` is borrowed until sluice_allocator_deinit. A failed allocation is NO_MEMORY with the requested bytes. */
void sluice_cuda_allocator_init(sluice_device_t* device, sluice_allocator_t* out_allocator);

typedef struct sluice_pinned_pool_s sluice_pinned_pool_t;

typedef struct sluice_pinned_block_s {
  void* data;
  uint64_t bytes; /* size of the block, at least the requested size */
  int32_t index;  /* the pool's own */
} sluice_pinned_block_t;

/* Creates a pool of at most limit_bytes of page-locked memory at one time, on the NUMA node of the device
 * (cuda_numa.h). out_pool: new, release with sluice_pinned_pool_destroy. device: borrowed until then. Threads:
 * context-exclusive. Errors: NO_MEMORY. */
sluice_status_t sluice_pinned_pool_create(sluice_device_t* device, uint64_t limit_bytes,
                                          sluice_pinned_pool_t** out_pool);
/* The same for device memory from `memory`, without a limit: cuMemFree waits for the device, so blocks of steps are
 * cached until memory is short. A new block is a sixteenth larger than requested. */
sluice_status_t sluice_device_pool_create(sluice_device_t* device, sluice_allocator_t* memory,
                                          sluice_pinned_pool_t** out_pool);
/* Accepts NULL. Waits on the host until the device is done with every block. */
void sluice_pinned_pool_destroy(sluice_pinned_pool_t* pool);

/* Takes a block that `stream` may use from here on: a cached block whose last user has finished as seen by `stream`
 * (which waits by event, never on the host), or a new one. Idle blocks of other sizes are freed if needed. most_bytes:
 * the largest size of the block, a multiple of the alignment; if memory or the limit leaves no space, idle blocks are
 * then freed even if the host has to wait for their last user. 0: any size, and no wait. Errors: OVER_BUDGET (limit,
 * held and wanted bytes), NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_pinned_pool_take(sluice_pinned_pool_t* pool, uint64_t bytes, uint64_t most_bytes,
                                        sluice_stream_t stream, sluice_pinned_block_t* out_block);
/* The same without a driver call, in a capture: an idle block, whose last user precedes the graph's launch, or
 * STATE. */
sluice_status_t sluice_pinned_pool_take_idle(sluice_pinned_pool_t* pool, uint64_t bytes,
                                             sluice_pinned_block_t* out_block);
/* Makes the block free once `stream` has passed this point. It becomes free even if this fails (EXTERNAL), after a host
 * wait. */
sluice_status_t sluice_pinned_pool_give(sluice_pinned_pool_t* pool, const sluice_pinned_block_t* block,
                                        sluice_stream_t stream);
/* The same for the block at address `data`. */
sluice_status_t sluice_pinned_pool_give_at(sluice_pinned_pool_t* pool, const void* data, sluice_stream_t stream);
/* Returns how many bytes are in idle blocks. */
uint64_t sluice_pinned_pool_idle_bytes(const sluice_pinned_pool_t* pool);
/* Blocks beyond the new limit are freed once they are idle and another block is taken. */
void sluice_pinned_pool_set_limit(sluice_pinned_pool_t* pool, uint64_t limit_bytes);

/* Copies between a pinned block and the device on a copy lane; stream-complete. Errors: EXTERNAL. */
sluice_status_t sluice_cuda_copy(sluice_device_t* device, sluice_stream_t stream, void* to, const void* from,
                                 uint64_t bytes);
sluice_status_t sluice_cuda_fill(sluice_device_t* device, sluice_stream_t stream, void* to, int32_t value,
                                 uint64_t bytes);
