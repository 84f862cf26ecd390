// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/search/search_state.h"

#include <math.h>

int32_t sluice_search_size_of(int32_t num_chunks) {
  int32_t i = SLUICE_SEARCH_SIZES - 1;
  while (i > 0 && sluice_chunk_counts[i] > num_chunks) --i;
  return i;
}

int32_t sluice_search_bucket(int64_t rows) {
  if (rows < 1) return 0;
  int32_t bucket = (int32_t)floor(4 * log2((double)rows) + 0.5);
  return bucket < SLUICE_SEARCH_BUCKETS ? bucket : SLUICE_SEARCH_BUCKETS - 1;
}
