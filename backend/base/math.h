// SPDX-License-Identifier: Apache-2.0
/* Arithmetic on sizes and times: int64_t without a suffix, uint64_t with _u64, int32_t with _i32. */
#pragma once

#include <stdint.h>

static inline int64_t sluice_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t sluice_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int32_t sluice_min_i32(int32_t a, int32_t b) { return a < b ? a : b; }
static inline uint64_t sluice_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t sluice_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Return the number of pieces of at most `piece` in `whole`, and their end. whole >= 0, piece > 0; whole + piece must
 * not overflow. */
static inline int64_t sluice_ceil_div(int64_t whole, int64_t piece) { return (whole + piece - 1) / piece; }
static inline uint64_t sluice_ceil_div_u64(uint64_t whole, uint64_t piece) { return (whole + piece - 1) / piece; }
static inline int64_t sluice_round_up(int64_t whole, int64_t piece) { return sluice_ceil_div(whole, piece) * piece; }
static inline uint64_t sluice_round_up_u64(uint64_t whole, uint64_t piece) {
  return sluice_ceil_div_u64(whole, piece) * piece;
}

/* UINT64_MAX, the deadline "never", is preserved. */
static inline uint64_t sluice_add_saturating(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }
