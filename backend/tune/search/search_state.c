// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/search/search_state.h"

#include <math.h>

int32_t sluice_search_size_of(int32_t num_chunks) {
  return num_chunks < 1 ? 0 : num_chunks > SLUICE_SEARCH_SIZES ? SLUICE_SEARCH_SIZES - 1 : num_chunks - 1;
}

static int is_listed(int32_t size) {
  int32_t i = 0;
  while (i < SLUICE_NUM_CHUNK_COUNTS && sluice_search_size_of(sluice_chunk_counts[i]) != size) ++i;
  return i < SLUICE_NUM_CHUNK_COUNTS;
}

int32_t sluice_search_next_size(int32_t size, int32_t step, int32_t lo, int32_t hi) {
  do {
    size += step;
  } while (size > lo && size < hi && !is_listed(size));
  return size;
}

int32_t sluice_search_bucket(int64_t rows) {
  if (rows < 1) return 0;
  int32_t bucket = (int32_t)floor(4 * log2((double)rows) + 0.5);
  return bucket < SLUICE_SEARCH_BUCKETS ? bucket : SLUICE_SEARCH_BUCKETS - 1;
}
