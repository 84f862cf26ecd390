// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/uneven_chunks.h"

/* Returns the chunks before `chunk` in units of half a chunk: 1 for each end, 2 for each other. */
static int32_t halves_before(int32_t chunk, int32_t num_chunks) {
  if (chunk == 0) return 0;
  return chunk == num_chunks ? 2 * num_chunks - 2 : 2 * chunk - 1;
}

int64_t sluice_uneven_chunk_start(int64_t rows, int32_t chunk, int32_t num_chunks) {
  if (num_chunks == 1) return chunk == 0 ? 0 : rows;
  return rows * halves_before(chunk, num_chunks) / (2 * num_chunks - 2);
}

double sluice_uneven_chunk_share(int32_t chunk, int32_t num_chunks) {
  if (num_chunks == 1) return 1;
  int32_t halves = halves_before(chunk + 1, num_chunks) - halves_before(chunk, num_chunks);
  return (double)halves / (2 * num_chunks - 2);
}
