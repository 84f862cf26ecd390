#include "backend/memory/arena.h"

#include <assert.h>

void sluice_arena_init(sluice_arena_t* arena, sluice_allocator_t* allocator) {
  *arena = (sluice_arena_t){.allocator = allocator};
}

void sluice_arena_deinit(sluice_arena_t* arena) {
  sluice_free(arena->allocator, arena->data, arena->capacity);
  arena->data = NULL;
  arena->capacity = 0;
}

static sluice_status_t grow(sluice_arena_t* arena, uint64_t bytes, const char* what) {
  if (arena->is_fixed) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "%s: %llu bytes are needed, and a captured graph uses the %llu that are there: make the largest "
                       "call once before the first capture, or make it on another context",
                       what, (unsigned long long)bytes, (unsigned long long)arena->capacity);
  }
  sluice_arena_deinit(arena);
  arena->data = sluice_alloc(arena->allocator, bytes, what);
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
