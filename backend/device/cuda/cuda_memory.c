// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/cuda_memory.h"

#include <string.h>

#include "backend/device/cuda/cuda_numa.h"

/* ---- device memory --------------------------------------------------------------------------------------------- */

static void* allocate(void* user, uint64_t bytes) {
  sluice_device_t* device = user;
  unsigned long long data = 0;
  if (sluice_cuda_enter(device) != SLUICE_OK) return NULL;
  int code = sluice_cuda_device_driver(device)->cuMemAlloc_v2(&data, bytes > 0 ? bytes : SLUICE_ALIGNMENT);
  sluice_status_t left = sluice_cuda_leave(device);
  if (code == 0 && left == SLUICE_OK) return (void*)(uintptr_t)data;
  if (code == 0) (void)sluice_cuda_device_driver(device)->cuMemFree_v2(data);
  return NULL;
}

static void release(void* user, void* data, uint64_t bytes) {
  sluice_device_t* device = user;
  (void)bytes;
  if (sluice_cuda_is_inherited(device)) return;
  int is_current = sluice_cuda_enter(device) == SLUICE_OK; /* freed even if not: the address identifies the context */
  (void)sluice_cuda_device_driver(device)->cuMemFree_v2((unsigned long long)(uintptr_t)data);
  if (is_current) (void)sluice_cuda_leave(device);
}

void sluice_cuda_allocator_init(sluice_device_t* device, sluice_allocator_t* out_allocator) {
  sluice_allocator_init(out_allocator, allocate, release, device);
}

sluice_status_t sluice_cuda_copy(sluice_device_t* device, sluice_stream_t stream, void* to, const void* from,
                                 uint64_t bytes) {
  if (bytes == 0) return SLUICE_OK;
  SLUICE_TRY(sluice_cuda_enter(device));
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  int code =
      driver->cuMemcpyAsync((unsigned long long)(uintptr_t)to, (unsigned long long)(uintptr_t)from, bytes, stream);
  sluice_status_t left = sluice_cuda_leave(device);
  if (code != 0) return sluice_cuda_fail(driver, code, "copy of %llu bytes", (unsigned long long)bytes);
  return left;
}

sluice_status_t sluice_cuda_fill(sluice_device_t* device, sluice_stream_t stream, void* to, int32_t value,
                                 uint64_t bytes) {
  if (bytes == 0) return SLUICE_OK;
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = driver->cuMemsetD8Async((unsigned long long)(uintptr_t)to, (unsigned char)value, bytes, stream);
  return sluice_cuda_leave_with(
      device,
      code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "%llu bytes cannot be filled", (unsigned long long)bytes));
}

/* ---- pools of blocks: pinned memory and device memory ----------------------------------------------------------- */

enum { MAX_BLOCKS = 4096 };

typedef struct pinned_s {
  void* data; /* NULL: empty entry */
  uint64_t bytes;
  void* done; /* event: the last user has finished */
  int32_t taken;
  int32_t mapped; /* cuda_numa.h */
} pinned_t;

struct sluice_pinned_pool_s {
  sluice_device_t* device;
  const sluice_cuda_driver_t* driver;
  sluice_allocator_t* memory; /* NULL: page-locked host memory */
  sluice_cuda_numa_t numa;
  uint64_t limit;
  uint64_t held;
  int32_t top; /* entries from here on are empty */
  pinned_t blocks[MAX_BLOCKS];
};

sluice_status_t sluice_pinned_pool_create(sluice_device_t* device, uint64_t limit_bytes,
                                          sluice_pinned_pool_t** out_pool) {
  *out_pool = NULL;
  sluice_pinned_pool_t* pool = sluice_alloc_zeroed(device->allocator, sizeof *pool, "pinned pool");
  if (pool == NULL) return sluice_alloc_status();
  pool->device = device;
  pool->driver = sluice_cuda_device_driver(device);
  pool->numa = sluice_cuda_device_numa(device);
  pool->limit = limit_bytes;
  *out_pool = pool;
  return SLUICE_OK;
}

sluice_status_t sluice_device_pool_create(sluice_device_t* device, sluice_allocator_t* memory,
                                          sluice_pinned_pool_t** out_pool) {
  SLUICE_TRY(sluice_pinned_pool_create(device, UINT64_MAX, out_pool));
  (*out_pool)->memory = memory;
  return SLUICE_OK;
}

static void free_block(sluice_pinned_pool_t* pool, pinned_t* block) {
  (void)pool->driver->cuEventDestroy_v2(block->done);
  if (pool->memory != NULL) {
    sluice_free(pool->memory, block->data, block->bytes);
  } else {
    sluice_cuda_numa_free(pool->driver, block->data, block->bytes, block->mapped);
  }
  pool->held -= block->bytes;
  *block = (pinned_t){.data = NULL};
}

void sluice_pinned_pool_destroy(sluice_pinned_pool_t* pool) {
  if (pool == NULL) return;
  if (!sluice_cuda_is_inherited(pool->device)) {
    int is_current = sluice_cuda_enter(pool->device) == SLUICE_OK;
    for (int32_t i = 0; i < pool->top; ++i) {
      pinned_t* block = &pool->blocks[i];
      if (block->data == NULL) continue;
      (void)pool->driver->cuEventSynchronize(block->done);
      free_block(pool, block);
    }
    if (is_current) (void)sluice_cuda_leave(pool->device);
  }
  sluice_free(pool->device->allocator, pool, sizeof *pool);
}

uint64_t sluice_pinned_pool_idle_bytes(const sluice_pinned_pool_t* pool) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < pool->top; ++i) bytes += pool->blocks[i].taken ? 0 : pool->blocks[i].bytes;
  return bytes;
}

void sluice_pinned_pool_set_limit(sluice_pinned_pool_t* pool, uint64_t limit_bytes) { pool->limit = limit_bytes; }

/* Returns the smallest idle block that is large enough, not wasteful, and at most `most` if that is not 0. */
static int32_t best_idle(const sluice_pinned_pool_t* pool, uint64_t bytes, uint64_t most) {
  int32_t best = -1;
  for (int32_t i = 0; i < pool->top; ++i) {
    const pinned_t* block = &pool->blocks[i];
    if (block->data == NULL || block->taken || block->bytes < bytes || block->bytes / 2 > bytes) continue;
    if (most > 0 && block->bytes > most) continue;
    if (best < 0 || block->bytes < pool->blocks[best].bytes) best = i;
  }
  return best;
}

/* Frees idle blocks without pending users until `bytes` fit below `limit`. waits: also frees blocks with pending users,
 * after waiting for these. */
static void make_room(sluice_pinned_pool_t* pool, uint64_t bytes, uint64_t limit, int waits) {
  for (int32_t i = 0; i < pool->top && pool->held + bytes > limit; ++i) {
    pinned_t* block = &pool->blocks[i];
    if (block->data == NULL || block->taken) continue;
    int busy = waits ? pool->driver->cuEventSynchronize(block->done) : pool->driver->cuEventQuery(block->done);
    if (busy == 0) free_block(pool, block);
  }
}

static sluice_status_t allocate_pinned(sluice_pinned_pool_t* pool, pinned_t* block) {
  int code = sluice_cuda_numa_alloc(pool->driver, &pool->numa, block->bytes, &block->data, &block->mapped);
  if (code == 0) return SLUICE_OK;
  return sluice_cuda_fail(pool->driver, code, "%llu bytes of pinned host memory (the pool holds %llu)",
                          (unsigned long long)block->bytes, (unsigned long long)pool->held);
}

/* If memory is short, idle blocks are freed first. */
static sluice_status_t allocate_rows(sluice_pinned_pool_t* pool, pinned_t* block, int waits) {
  for (int attempt = 0;; ++attempt) {
    block->data = sluice_alloc(pool->memory, block->bytes, "saved rows");
    if (block->data != NULL) return SLUICE_OK;
    if (attempt == 1 + waits) return sluice_alloc_status();
    make_room(pool, 1, 0, attempt);
  }
}

static sluice_status_t new_block(sluice_pinned_pool_t* pool, uint64_t bytes, uint64_t most, int32_t* out_index) {
  int32_t i = 0;
  int may_wait = most > 0;
  if (pool->memory != NULL) {
    uint64_t spare = sluice_align_up(bytes + bytes / 16);
    bytes = most > 0 && spare > most ? most : spare;
  } else {
    for (int waits = 0; waits <= may_wait; ++waits) make_room(pool, bytes, pool->limit, waits);
  }
  if (bytes > pool->limit || pool->held > pool->limit - bytes) {
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "cuda: %llu bytes of pinned memory do not fit: the pool holds %llu of its %llu bytes; raise "
                       "host_memory_budget or offload less",
                       (unsigned long long)bytes, (unsigned long long)pool->held, (unsigned long long)pool->limit);
  }
  while (i < MAX_BLOCKS && pool->blocks[i].data != NULL) ++i;
  if (i == MAX_BLOCKS) return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "cuda: the pool has all of its %d blocks", MAX_BLOCKS);
  pinned_t block = {.bytes = bytes};
  int code = pool->driver->cuEventCreate(&block.done, SLUICE_CU_EVENT_DISABLE_TIMING);
  if (code != 0) return sluice_cuda_fail(pool->driver, code, "no event for a block of memory");
  sluice_status_t status = pool->memory != NULL ? allocate_rows(pool, &block, may_wait) : allocate_pinned(pool, &block);
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    (void)pool->driver->cuEventDestroy_v2(block.done);
    return sluice_error_adopt(&why);
  }
  pool->blocks[i] = block;
  if (i >= pool->top) pool->top = i + 1;
  pool->held += bytes;
  *out_index = i;
  return SLUICE_OK;
}

static sluice_status_t take(sluice_pinned_pool_t* pool, uint64_t bytes, uint64_t most, sluice_stream_t stream,
                            int32_t* out_index) {
  *out_index = best_idle(pool, bytes, most);
  if (*out_index < 0) return new_block(pool, bytes, most, out_index);
  int code = pool->driver->cuStreamWaitEvent(stream, pool->blocks[*out_index].done, 0);
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(pool->driver, code, "wait for the last user of pinned memory");
}

sluice_status_t sluice_pinned_pool_take(sluice_pinned_pool_t* pool, uint64_t bytes, uint64_t most_bytes,
                                        sluice_stream_t stream, sluice_pinned_block_t* out_block) {
  int32_t index = -1;
  *out_block = (sluice_pinned_block_t){.index = -1};
  SLUICE_TRY(sluice_cuda_enter(pool->device));
  SLUICE_TRY(sluice_cuda_leave_with(pool->device,
                                    take(pool, sluice_align_up(bytes > 0 ? bytes : 1), most_bytes, stream, &index)));
  pool->blocks[index].taken = 1;
  *out_block = (sluice_pinned_block_t){pool->blocks[index].data, pool->blocks[index].bytes, index};
  return SLUICE_OK;
}

sluice_status_t sluice_pinned_pool_take_idle(sluice_pinned_pool_t* pool, uint64_t bytes,
                                             sluice_pinned_block_t* out_block) {
  int32_t index = best_idle(pool, sluice_align_up(bytes > 0 ? bytes : 1), 0);
  *out_block = (sluice_pinned_block_t){.index = -1};
  if (index < 0) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "cuda: no block of %llu bytes is free, and a capture cannot allocate one: before it run the "
                       "same calls once with as many tokens and outstanding steps, and drop those steps",
                       (unsigned long long)bytes);
  }
  pool->blocks[index].taken = 1;
  *out_block = (sluice_pinned_block_t){pool->blocks[index].data, pool->blocks[index].bytes, index};
  return SLUICE_OK;
}

sluice_status_t sluice_pinned_pool_give(sluice_pinned_pool_t* pool, const sluice_pinned_block_t* given,
                                        sluice_stream_t stream) {
  pinned_t* block = &pool->blocks[given->index];
  block->taken = 0;
  SLUICE_TRY(sluice_cuda_enter(pool->device));
  sluice_status_t status = SLUICE_OK;
  int code = pool->driver->cuEventRecord(block->done, stream);
  if (code != 0) {
    status = sluice_cuda_fail(pool->driver, code, "the end of a use of pinned memory cannot be recorded");
    (void)pool->driver->cuStreamSynchronize(stream); /* the next user must not start too early */
  }
  return sluice_cuda_leave_with(pool->device, status);
}

sluice_status_t sluice_pinned_pool_give_at(sluice_pinned_pool_t* pool, const void* data, sluice_stream_t stream) {
  for (int32_t i = 0; i < pool->top; ++i) {
    if (pool->blocks[i].data != data || !pool->blocks[i].taken) continue;
    const sluice_pinned_block_t block = {pool->blocks[i].data, pool->blocks[i].bytes, i};
    return sluice_pinned_pool_give(pool, &block, stream);
  }
  return SLUICE_FAIL(SLUICE_E_INTERNAL, "cuda: %p is not a block of the pinned pool", data);
}
