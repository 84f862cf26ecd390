// SPDX-License-Identifier: Apache-2.0
#include "backend/base/state_set.h"

#include <string.h>

#define FIRST_CAPACITY 1024

static uint64_t state_bytes(const sluice_state_set_t* set) {
  return (uint64_t)set->capacity * (uint64_t)set->words * sizeof *set->states;
}

static uint64_t bucket_bytes(const sluice_state_set_t* set) {
  return (uint64_t)set->num_buckets * sizeof *set->buckets;
}

void sluice_state_set_init(sluice_state_set_t* set, int32_t words, sluice_allocator_t* allocator) {
  *set = (sluice_state_set_t){.allocator = allocator, .words = words};
}

void sluice_state_set_deinit(sluice_state_set_t* set) {
  if (set->states != NULL) sluice_free(set->allocator, set->states, state_bytes(set));
  if (set->buckets != NULL) sluice_free(set->allocator, set->buckets, bucket_bytes(set));
  sluice_state_set_init(set, set->words, set->allocator);
}

/* One multiplication per word: FNV's one per byte would dominate the time of an exploration. */
static uint64_t hash_of(const uint64_t* state, int32_t words) {
  uint64_t hash = 0x9e3779b97f4a7c15u;
  for (int32_t i = 0; i < words; ++i) {
    hash = (hash ^ state[i]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

/* Returns the bucket of the state, or an empty one for it. */
static int32_t* bucket_of(const sluice_state_set_t* set, const uint64_t* state) {
  uint64_t mask = (uint64_t)set->num_buckets - 1, at = hash_of(state, set->words) & mask;
  for (;; at = (at + 1) & mask) {
    int32_t number = set->buckets[at] - 1;
    if (number < 0) return &set->buckets[at];
    if (memcmp(sluice_state_set_get(set, number), state, (size_t)set->words * sizeof *state) == 0) {
      return &set->buckets[at];
    }
  }
}

static sluice_status_t grow(sluice_state_set_t* set) {
  sluice_state_set_t larger = *set;
  larger.capacity = set->capacity > 0 ? 2 * set->capacity : FIRST_CAPACITY;
  larger.num_buckets = 2 * larger.capacity;
  larger.states = sluice_alloc(set->allocator, state_bytes(&larger), "states of a pipeline");
  if (larger.states == NULL) return sluice_alloc_status();
  larger.buckets = sluice_alloc_zeroed(set->allocator, bucket_bytes(&larger), "states of a pipeline");
  if (larger.buckets == NULL) {
    sluice_status_t status = sluice_alloc_status();
    sluice_free(set->allocator, larger.states, state_bytes(&larger));
    return status;
  }
  if (set->count > 0) memcpy(larger.states, set->states, (size_t)set->count * (size_t)set->words * sizeof(uint64_t));
  int64_t count = set->count;
  sluice_state_set_deinit(set);
  *set = larger;
  for (int64_t i = 0; i < count; ++i) *bucket_of(set, sluice_state_set_get(set, i)) = (int32_t)i + 1;
  return SLUICE_OK;
}

sluice_status_t sluice_state_set_add(sluice_state_set_t* set, const uint64_t* state) {
  if (set->count == set->capacity) SLUICE_TRY(grow(set));
  int32_t* bucket = bucket_of(set, state);
  if (*bucket > 0) return SLUICE_OK;
  if (set->count == INT32_MAX - 1) return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "states of a pipeline: more than 2^31");
  memcpy(set->states + set->count * set->words, state, (size_t)set->words * sizeof *state);
  *bucket = (int32_t)++set->count;
  return SLUICE_OK;
}
