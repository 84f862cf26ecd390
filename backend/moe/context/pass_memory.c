// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/context/pass_memory.h"

#include <string.h>

void sluice_pass_memory_init(sluice_pass_memory_t* memory, sluice_allocator_t* rows, sluice_allocator_t* host) {
  memset(memory, 0, sizeof *memory);
  sluice_arena_init(&memory->slots, rows);
  sluice_arena_init(&memory->routes, rows);
  sluice_arena_init(&memory->device_token_copies, rows);
  sluice_arena_init(&memory->device_node_copies, rows);
  sluice_arena_init(&memory->scratch, host);
  sluice_arena_init(&memory->binding, host);
  sluice_arena_init(&memory->token_copies, host);
  sluice_arena_init(&memory->node_copies, host);
  sluice_arena_init(&memory->layout, host);
  sluice_arena_init(&memory->cut, host);
}

void sluice_pass_memory_deinit(sluice_pass_memory_t* memory) {
  sluice_arena_deinit(&memory->slots);
  sluice_arena_deinit(&memory->scratch);
  sluice_arena_deinit(&memory->routes);
  sluice_arena_deinit(&memory->binding);
  sluice_arena_deinit(&memory->token_copies);
  sluice_arena_deinit(&memory->device_token_copies);
  sluice_arena_deinit(&memory->node_copies);
  sluice_arena_deinit(&memory->device_node_copies);
  sluice_arena_deinit(&memory->layout);
  sluice_arena_deinit(&memory->cut);
}

void sluice_pass_memory_give_back(sluice_pass_memory_t* memory) {
  sluice_arena_t* const arenas[] = {&memory->slots,
                                    &memory->routes,
                                    &memory->binding,
                                    &memory->token_copies,
                                    &memory->device_token_copies,
                                    &memory->node_copies,
                                    &memory->device_node_copies,
                                    &memory->layout,
                                    &memory->cut};
  for (size_t i = 0; i < sizeof arenas / sizeof arenas[0]; ++i) {
    if (arenas[i]->is_fixed) continue;
    sluice_arena_deinit(arenas[i]);
    arenas[i]->used = 0, arenas[i]->num_growths = 0;
  }
}

uint64_t sluice_pass_memory_row_bytes(const sluice_pass_memory_t* memory) {
  return memory->slots.capacity + memory->routes.capacity + memory->device_token_copies.capacity +
         memory->device_node_copies.capacity;
}

uint64_t sluice_pass_memory_host_bytes(const sluice_pass_memory_t* memory) {
  return memory->scratch.capacity + memory->binding.capacity + memory->token_copies.capacity +
         memory->node_copies.capacity + memory->layout.capacity + memory->cut.capacity;
}
