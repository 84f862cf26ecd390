// SPDX-License-Identifier: Apache-2.0
/* The memory of one running pass: everything that it takes besides what steps keep. A pass and its binding point to it
 * and know no other, so that a context may have several. Reused from pass to pass. */
#ifndef SLUICE_BACKEND_MOE_CONTEXT_PASS_MEMORY_H_
#define SLUICE_BACKEND_MOE_CONTEXT_PASS_MEMORY_H_

#include "backend/memory/arena.h"

/* Slots since the last candidate was on trial. */
typedef struct sluice_settled_s {
  int32_t had_trials; /* since slots were given back last */
  int32_t num_passes;
  uint64_t most_bytes; /* that one of the later half of these passes needed */
} sluice_settled_t;

typedef struct sluice_pass_memory_s {
  sluice_arena_t slots;               /* temporaries */
  sluice_settled_t settled;           /* when slots that only trials needed are given back */
  sluice_arena_t scratch;             /* with device memory: what the host keeps */
  sluice_arena_t routes;              /* with device memory: routes of a forward, in its memory */
  sluice_arena_t binding;             /* offsets and boundaries */
  sluice_arena_t token_copies;        /* where the layer is deduplicated */
  sluice_arena_t device_token_copies; /* of its forward, in the memory of a device with memory of its own */
  sluice_arena_t node_copies;         /* where tokens travel by node */
  sluice_arena_t device_node_copies;  /* what kernels read of them, in the memory of such a device */
  sluice_arena_t layout;              /* where slots begin */
  sluice_arena_t cut;                 /* under a plan: rows by block of tokens and rank */
} sluice_pass_memory_t;

/* rows: slots and what lies with them; host: the rest. The same where the device works in host memory. */
void sluice_pass_memory_init(sluice_pass_memory_t* memory, sluice_allocator_t* rows, sluice_allocator_t* host);
void sluice_pass_memory_deinit(sluice_pass_memory_t* memory);

/* All but the host's scratch, which no budget counts, and what captured graphs use. */
void sluice_pass_memory_give_back(sluice_pass_memory_t* memory);

/* Bytes of all arenas that lie with rows, and of all the others. */
uint64_t sluice_pass_memory_row_bytes(const sluice_pass_memory_t* memory);
uint64_t sluice_pass_memory_host_bytes(const sluice_pass_memory_t* memory);

#endif /* SLUICE_BACKEND_MOE_CONTEXT_PASS_MEMORY_H_ */
