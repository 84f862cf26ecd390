// SPDX-License-Identifier: Apache-2.0
/* A pool of blocks for the offloaded rows of outstanding forwards on a CPU. Blocks are kept between steps, because
 * touching fresh pages is slower than the copies. Each tensor has its own pool, so all its blocks have similar sizes.
 *
 * A pool has at most as many blocks as were held at one time: a block that is too small is replaced. Idle blocks count
 * as allocated, and an allocator that reaches its limit frees them first (sluice_pool_reclaim). Thread-safe. */
#pragma once

#include <pthread.h>

#include "backend/base/alloc.h"

typedef struct sluice_pool_block_s sluice_pool_block_t;

typedef struct sluice_pool_s {
  pthread_mutex_t mutex;
  sluice_allocator_t* allocator; /* counts the blocks */
  int32_t is_host;               /* blocks are process memory, which a host may free after the context is destroyed */
  sluice_pool_block_t* blocks;
  int32_t count, capacity;
  uint64_t idle_bytes;
  uint64_t num_allocations; /* since the pool was made */
} sluice_pool_t;

void sluice_pool_init(sluice_pool_t* pool, sluice_allocator_t* allocator, int32_t is_host);
/* Frees the idle blocks. The host frees the blocks that it still holds, as process memory. */
void sluice_pool_deinit(sluice_pool_t* pool);

/* Takes a 64-byte aligned block of at least `bytes` > 0: the smallest idle block that is large enough, else a new one,
 * which replaces the largest idle block. out_bytes: the size that is counted. Errors: OVER_BUDGET, NO_MEMORY. */
sluice_status_t sluice_pool_take(sluice_pool_t* pool, uint64_t bytes, const char* what, void** out_data,
                                 uint64_t* out_bytes);
/* Returns a block to the pool. Returns its bytes; 0: the pool holds no such block. */
uint64_t sluice_pool_give(sluice_pool_t* pool, const void* data);
/* Frees the idle blocks. */
void sluice_pool_reclaim(sluice_pool_t* pool);

uint64_t sluice_pool_idle_bytes(sluice_pool_t* pool);
uint64_t sluice_pool_num_allocations(sluice_pool_t* pool);
