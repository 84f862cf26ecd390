// SPDX-License-Identifier: Apache-2.0
#include "backend/memory/pool.h"

#include <string.h>

struct sluice_pool_block_s {
  void* data;
  uint64_t bytes; /* a multiple of 64 */
  int32_t is_held;
};

void sluice_pool_init(sluice_pool_t* pool, sluice_allocator_t* allocator, int32_t is_host) {
  memset(pool, 0, sizeof *pool);
  pool->allocator = allocator;
  pool->is_host = is_host;
  pthread_mutex_init(&pool->mutex, NULL);
}

static void release(sluice_pool_t* pool, void* data, uint64_t bytes) {
  sluice_free(pool->is_host ? sluice_process_allocator() : pool->allocator, data, bytes);
  if (pool->is_host) sluice_allocator_discharge(pool->allocator, bytes);
}

static sluice_status_t allocate(sluice_pool_t* pool, uint64_t bytes, const char* what, void** out_data) {
  if (!pool->is_host) {
    *out_data = sluice_alloc(pool->allocator, bytes, what);
    return *out_data != NULL ? SLUICE_OK : sluice_alloc_status();
  }
  SLUICE_TRY(sluice_allocator_charge(pool->allocator, bytes, what));
  *out_data = sluice_alloc(sluice_process_allocator(), bytes, what);
  if (*out_data != NULL) return SLUICE_OK;
  sluice_allocator_discharge(pool->allocator, bytes);
  return sluice_alloc_status();
}

/* Returns the smallest idle block that is large enough, else the largest idle block; -1: none is idle. */
static int32_t nearest(const sluice_pool_t* pool, uint64_t bytes) {
  int32_t found = -1;
  for (int32_t i = 0; i < pool->count; ++i) {
    const sluice_pool_block_t* block = &pool->blocks[i];
    if (block->is_held) continue;
    const uint64_t best = found < 0 ? 0 : pool->blocks[found].bytes;
    if (best < bytes ? block->bytes >= best : block->bytes >= bytes && block->bytes < best) found = i;
  }
  return found;
}

static void forget(sluice_pool_t* pool, int32_t at) {
  if (!pool->blocks[at].is_held) pool->idle_bytes -= pool->blocks[at].bytes;
  pool->blocks[at] = pool->blocks[--pool->count];
}

static sluice_status_t make_room(sluice_pool_t* pool) {
  if (pool->count < pool->capacity) return SLUICE_OK;
  int32_t capacity = pool->capacity > 0 ? 2 * pool->capacity : 8;
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_pool_block_t* blocks = sluice_alloc(allocator, (uint64_t)capacity * sizeof *blocks, "list of pooled blocks");
  if (blocks == NULL) return sluice_alloc_status();
  if (pool->count > 0) memcpy(blocks, pool->blocks, (size_t)pool->count * sizeof *blocks);
  sluice_free(allocator, pool->blocks, (uint64_t)pool->capacity * sizeof *blocks);
  pool->blocks = blocks, pool->capacity = capacity;
  return SLUICE_OK;
}

/* Takes an idle block that is large enough. If there is none, returns NULL, and *out_old is a removed block for the
 * caller to release before it allocates a new one; its data is NULL if no block is idle. */
static void* take_idle(sluice_pool_t* pool, uint64_t bytes, uint64_t* out_bytes, sluice_pool_block_t* out_old) {
  const int32_t at = nearest(pool, bytes);
  *out_old = (sluice_pool_block_t){0};
  if (at < 0) return NULL;
  sluice_pool_block_t* block = &pool->blocks[at];
  if (block->bytes < bytes) {
    *out_old = *block;
    forget(pool, at);
    return NULL;
  }
  block->is_held = 1;
  pool->idle_bytes -= block->bytes;
  *out_bytes = block->bytes;
  return block->data;
}

static sluice_status_t add(sluice_pool_t* pool, void* data, uint64_t bytes) {
  SLUICE_TRY(make_room(pool));
  pool->blocks[pool->count++] = (sluice_pool_block_t){data, bytes, 1};
  ++pool->num_allocations;
  return SLUICE_OK;
}

sluice_status_t sluice_pool_take(sluice_pool_t* pool, uint64_t bytes, const char* what, void** out_data,
                                 uint64_t* out_bytes) {
  sluice_pool_block_t old;
  pthread_mutex_lock(&pool->mutex);
  *out_data = take_idle(pool, bytes, out_bytes, &old);
  pthread_mutex_unlock(&pool->mutex);
  if (*out_data != NULL) return SLUICE_OK;
  if (old.data != NULL) release(pool, old.data, old.bytes);
  /* Without the mutex, because an allocator at its limit calls sluice_pool_reclaim. */
  *out_bytes = sluice_align_up(bytes);
  SLUICE_TRY(allocate(pool, *out_bytes, what, out_data));
  pthread_mutex_lock(&pool->mutex);
  sluice_status_t status = add(pool, *out_data, *out_bytes);
  pthread_mutex_unlock(&pool->mutex);
  if (status == SLUICE_OK) return SLUICE_OK;
  release(pool, *out_data, *out_bytes);
  *out_data = NULL;
  return status;
}

uint64_t sluice_pool_give(sluice_pool_t* pool, const void* data) {
  uint64_t bytes = 0;
  pthread_mutex_lock(&pool->mutex);
  for (int32_t i = 0; i < pool->count && bytes == 0; ++i) {
    sluice_pool_block_t* block = &pool->blocks[i];
    if (!block->is_held || block->data != data) continue;
    bytes = block->bytes;
    block->is_held = 0;
    pool->idle_bytes += bytes;
  }
  pthread_mutex_unlock(&pool->mutex);
  return bytes;
}

void sluice_pool_reclaim(sluice_pool_t* pool) {
  pthread_mutex_lock(&pool->mutex);
  for (int32_t i = pool->count; i-- > 0;) {
    const sluice_pool_block_t block = pool->blocks[i];
    if (block.is_held) continue;
    forget(pool, i);
    release(pool, block.data, block.bytes);
  }
  pthread_mutex_unlock(&pool->mutex);
}

void sluice_pool_deinit(sluice_pool_t* pool) {
  sluice_pool_reclaim(pool);
  sluice_free(sluice_process_allocator(), pool->blocks, (uint64_t)pool->capacity * sizeof *pool->blocks);
  pthread_mutex_destroy(&pool->mutex);
}

uint64_t sluice_pool_idle_bytes(sluice_pool_t* pool) {
  pthread_mutex_lock(&pool->mutex);
  uint64_t bytes = pool->idle_bytes;
  pthread_mutex_unlock(&pool->mutex);
  return bytes;
}

uint64_t sluice_pool_num_allocations(sluice_pool_t* pool) {
  pthread_mutex_lock(&pool->mutex);
  uint64_t count = pool->num_allocations;
  pthread_mutex_unlock(&pool->mutex);
  return count;
}
