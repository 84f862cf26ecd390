// SPDX-License-Identifier: Apache-2.0
/* Blocks that outstanding forwards hold for offloaded rows on a CPU, kept between steps: fresh pages cost more than the
 * copies do. One pool for each tensor, so that every block of it has about one size.
 *
 * There are never more blocks than were held at once: one that is too small makes way for its successor. Idle ones
 * count as allocated; where the allocator runs into its limit they go first (sluice_pool_reclaim). Thread-safe. */
#ifndef SLUICE_BACKEND_MEMORY_POOL_H_
#define SLUICE_BACKEND_MEMORY_POOL_H_

#include <pthread.h>

#include "backend/base/alloc.h"

typedef struct sluice_pool_block_s sluice_pool_block_t;

typedef struct sluice_pool_s {
  pthread_mutex_t mutex;
  sluice_allocator_t* allocator; /* counts the blocks */
  int32_t is_host;               /* memory is the process's: a host may free it after the context */
  sluice_pool_block_t* blocks;
  int32_t count, capacity;
  uint64_t idle_bytes;
  uint64_t num_allocations; /* since the pool was made */
} sluice_pool_t;

void sluice_pool_init(sluice_pool_t* pool, sluice_allocator_t* allocator, int32_t is_host);
/* Frees the idle blocks. What a host still holds is its own to free, as memory of the process's. */
void sluice_pool_deinit(sluice_pool_t* pool);

/* A block of at least `bytes` > 0, 64-byte aligned: the smallest idle one that does, or a fresh one of that size in
 * place of the largest idle one. out_bytes: what it counts. Errors: OVER_BUDGET, NO_MEMORY. */
sluice_status_t sluice_pool_take(sluice_pool_t* pool, uint64_t bytes, const char* what, void** out_data,
                                 uint64_t* out_bytes);
/* The block is idle from now on: its bytes; 0: it is none of this pool's. */
uint64_t sluice_pool_give(sluice_pool_t* pool, const void* data);
/* Frees the idle blocks. */
void sluice_pool_reclaim(sluice_pool_t* pool);

uint64_t sluice_pool_idle_bytes(sluice_pool_t* pool);
uint64_t sluice_pool_num_allocations(sluice_pool_t* pool);

#endif /* SLUICE_BACKEND_MEMORY_POOL_H_ */
