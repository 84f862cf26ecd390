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

sluice_status_t sluice_arena_reset(sluice_arena_t* arena, uint64_t bytes, const char* what) {
  arena->used = 0;
  if (bytes <= arena->capacity && arena->data != NULL) return SLUICE_OK;
  uint64_t wanted = sluice_align_up(bytes == 0 ? 1 : bytes);
  if (arena->num_growths > 0) wanted = sluice_align_up(wanted + wanted / 16);
  sluice_arena_deinit(arena);
  arena->data = sluice_alloc(arena->allocator, wanted, what);
  if (arena->data == NULL) return SLUICE_E_NO_MEMORY;
  arena->capacity = wanted;
  ++arena->num_growths;
  return SLUICE_OK;
}

void* sluice_arena_take(sluice_arena_t* arena, uint64_t bytes) {
  void* data = arena->data + arena->used;
  arena->used += sluice_align_up(bytes);
  assert(arena->used <= arena->capacity);
  return data;
}
