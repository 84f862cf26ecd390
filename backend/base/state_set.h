// SPDX-License-Identifier: Apache-2.0
/* A set of states of a fixed number of words, numbered in the order of insertion: for checkers that explore all
 * states. */
#pragma once

#include "backend/base/alloc.h"

typedef struct sluice_state_set_s {
  sluice_allocator_t* allocator;
  int32_t words;
  int64_t count, capacity;
  int64_t num_buckets; /* a power of two; 0 before the first state */
  uint64_t* states;    /* [capacity][words] */
  int32_t* buckets;    /* number + 1; 0: empty */
} sluice_state_set_t;

void sluice_state_set_init(sluice_state_set_t* set, int32_t words, sluice_allocator_t* allocator);
void sluice_state_set_deinit(sluice_state_set_t* set);
/* Adds the state if it is new. Errors: NO_MEMORY. */
sluice_status_t sluice_state_set_add(sluice_state_set_t* set, const uint64_t* state);
/* Returns a pointer that is valid until the next addition. */
static inline const uint64_t* sluice_state_set_get(const sluice_state_set_t* set, int64_t number) {
  return set->states + number * set->words;
}
