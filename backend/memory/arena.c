// SPDX-License-Identifier: Apache-2.0
#include "backend/memory/arena.h"

#include <assert.h>

void sluice_arena_init(sluice_arena_t* arena, sluice_allocator_t* allocator) {
  *arena = (sluice_arena_t){.allocator = allocator};
}

void sluice_arena_deinit(sluice_arena_t* arena) {
  if (arena->is_from_source) {
    arena->source.release(arena->source.user, arena->data);
    sluice_allocator_discharge(arena->allocator, arena->capacity);
  } else {
    sluice_free(arena->allocator, arena->data, arena->capacity);
  }
  arena->is_from_source = 0;
  arena->data = NULL;
  arena->capacity = 0;
}

static sluice_status_t take_from_source(sluice_arena_t* arena, uint64_t bytes, const char* what) {
  void* data = NULL;
  if (arena->source.allocate == NULL) return SLUICE_OK;
  SLUICE_TRY(sluice_allocator_charge(arena->allocator, bytes, what));
  sluice_status_t status = arena->source.allocate(arena->source.user, bytes, &data);
  if (data == NULL) sluice_allocator_discharge(arena->allocator, bytes);
  arena->data = data;
  arena->is_from_source = data != NULL;
  return status;
}

static sluice_status_t grow(sluice_arena_t* arena, uint64_t bytes, const char* what) {
  if (arena->is_fixed) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "%s: %llu bytes are needed, but a captured graph uses the present %llu bytes: run the largest "
                       "call once before the first capture, or run it in another context",
                       what, (unsigned long long)bytes, (unsigned long long)arena->capacity);
  }
  sluice_arena_deinit(arena);
  SLUICE_TRY(take_from_source(arena, bytes, what));
  if (arena->data == NULL) arena->data = sluice_alloc(arena->allocator, bytes, what);
  if (arena->data == NULL) return sluice_alloc_status();
  arena->capacity = bytes;
  ++arena->num_growths;
  return SLUICE_OK;
}

sluice_status_t sluice_arena_reset(sluice_arena_t* arena, uint64_t bytes, const char* what) {
  arena->used = 0;
  if (bytes <= arena->capacity && arena->data != NULL) return SLUICE_OK;
  uint64_t wanted = sluice_align_up(bytes == 0 ? 1 : bytes);
  if (arena->num_growths > 1) wanted = sluice_align_up(wanted + wanted / 16);
  return grow(arena, wanted, what);
}

sluice_status_t sluice_arena_reserve(sluice_arena_t* arena, uint64_t bytes, const char* what) {
  arena->used = 0;
  if (bytes <= arena->capacity && arena->data != NULL) return SLUICE_OK;
  return grow(arena, sluice_align_up(bytes == 0 ? 1 : bytes), what);
}

void* sluice_arena_take(sluice_arena_t* arena, uint64_t bytes) {
  void* data = arena->data + arena->used;
  arena->used += sluice_align_up(bytes);
  assert(arena->used <= arena->capacity);
  return data;
}
