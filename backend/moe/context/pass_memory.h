// SPDX-License-Identifier: Apache-2.0
/* The memory of one running pass, except saved buffers of steps, reused from pass to pass. A pass and its binding use
 * no other, so that a context could have several. */
#pragma once

#include "backend/memory/arena.h"

/* Slot bytes needed since the last trial of a candidate. */
typedef struct sluice_settled_s {
  int32_t had_trials; /* since slots were last freed */
  int32_t num_passes;
  uint64_t most_bytes; /* needed by a pass of the later half of these passes */
} sluice_settled_t;

typedef struct sluice_pass_memory_s {
  sluice_arena_t slots;               /* temporaries */
  sluice_settled_t settled;           /* decides when slots that only trials needed are freed */
  sluice_arena_t scratch;             /* with device memory: scratch in host memory */
  sluice_arena_t routes;              /* with device memory: routes of a forward, in device memory */
  sluice_arena_t binding;             /* offsets and boundaries */
  sluice_arena_t token_copies;        /* of a deduplicated layer */
  sluice_arena_t device_token_copies; /* of its forward, in device memory */
  sluice_arena_t node_copies;         /* of exchanges in two levels */
  sluice_arena_t device_node_copies;  /* the part that kernels read, in device memory */
  sluice_arena_t layout;              /* offsets of slots */
  sluice_arena_t cut;                 /* under a plan: rows by block of tokens and rank */
} sluice_pass_memory_t;

/* rows: allocator of slots and other row memory; host: of the rest. The same if the device works in host memory. */
void sluice_pass_memory_init(sluice_pass_memory_t* memory, sluice_allocator_t* rows, sluice_allocator_t* host);
void sluice_pass_memory_deinit(sluice_pass_memory_t* memory);

/* Frees all arenas except the host's scratch, which no budget counts, and those that captured graphs use. */
void sluice_pass_memory_give_back(sluice_pass_memory_t* memory);

/* Bytes of all arenas in row memory, and of all others. */
uint64_t sluice_pass_memory_row_bytes(const sluice_pass_memory_t* memory);
uint64_t sluice_pass_memory_host_bytes(const sluice_pass_memory_t* memory);
