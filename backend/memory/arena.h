// SPDX-License-Identifier: Apache-2.0
/* A bump allocator for the temporaries of a pass. All passes of a context share its block, so L layers need one set of
 * slots. The block is kept between passes, because touching fresh pages is slower than copying (2 against 8 GB/s). */
#pragma once

#include "backend/base/alloc.h"

/* Another source of memory, which the arena's allocator still counts. If allocate returns OK and NULL, the arena takes
 * memory of its allocator. */
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
  int32_t is_fixed; /* a captured graph uses the block, so growing fails with STATE */
  int32_t is_from_source;
  sluice_arena_source_t source; /* functions are NULL if there is none */
} sluice_arena_t;

void sluice_arena_init(sluice_arena_t* arena, sluice_allocator_t* allocator);
void sluice_arena_deinit(sluice_arena_t* arena);
/* Starts a pass that takes at most `bytes`; contents are lost. The first two growths (forward, backward) allocate
 * exactly that; later ones add a sixteenth, so that small changes of the routing do not reallocate in every step. */
sluice_status_t sluice_arena_reset(sluice_arena_t* arena, uint64_t bytes, const char* what);
/* As sluice_arena_reset, but never adds a sixteenth. */
sluice_status_t sluice_arena_reserve(sluice_arena_t* arena, uint64_t bytes, const char* what);
/* Returns 64-byte aligned memory. The sum of all takes, each aligned up, must not exceed the bytes of the reset. */
void* sluice_arena_take(sluice_arena_t* arena, uint64_t bytes);
