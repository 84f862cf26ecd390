// SPDX-License-Identifier: Apache-2.0
/* One block of temporaries that all passes of a context share: L layers cost one set of slots. It grows when a pass
 * needs more and is kept otherwise, since fresh pages cost more than copying does (2 against 8 GB/s measured). */
#ifndef SLUICE_BACKEND_MEMORY_ARENA_H_
#define SLUICE_BACKEND_MEMORY_ARENA_H_

#include "backend/base/alloc.h"

/* Memory from elsewhere, counted by the arena's allocator all the same. allocate gives NULL where it has none, without
 * an error: then the allocator's own is taken. */
typedef struct sluice_arena_source_s {
  sluice_status_t (*allocate)(void* user, uint64_t bytes, void** out_data);
  void (*release)(void* user, void* data);
  void* user;
} sluice_arena_source_t;

typedef struct sluice_arena_s {
  sluice_allocator_t* allocator;
  char* data;
  uint64_t capacity;
  uint64_t used; /* bytes handed out since the last reset */
  int32_t num_growths;
  int32_t is_fixed; /* a captured graph uses it: growing is STATE */
  int32_t is_from_source;
  sluice_arena_source_t source; /* functions NULL: none */
} sluice_arena_t;

void sluice_arena_init(sluice_arena_t* arena, sluice_allocator_t* allocator);
void sluice_arena_deinit(sluice_arena_t* arena);
/* Forgets what was handed out and makes room for `bytes`; contents are lost. Forward and backward get
 * their size exactly; from the third growth on it leaves a sixteenth to spare, so that routing that varies a little
 * from step to step does not move it each time. */
sluice_status_t sluice_arena_reset(sluice_arena_t* arena, uint64_t bytes, const char* what);
/* Makes the capacity at least `bytes` and not one more; contents are lost if it grows. */
sluice_status_t sluice_arena_reserve(sluice_arena_t* arena, uint64_t bytes, const char* what);
/* 64-byte aligned; the sum of all takes (each aligned up) must fit what reset was asked for. */
void* sluice_arena_take(sluice_arena_t* arena, uint64_t bytes);

#endif /* SLUICE_BACKEND_MEMORY_ARENA_H_ */
