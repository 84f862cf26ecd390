// SPDX-License-Identifier: Apache-2.0
/* Software prefetch of the rows of a block. Internal to backend/gemm/native.
 *
 * The hardware prefetcher of the processor reads ahead in many pages at a time, but not far in each. So this walk can
 * alternate between rows in several pages, line by line: on one Sapphire Rapids core it fetched 13 GB/s from memory,
 * and 9 GB/s row after row. Alternating costs a few more instructions, and is not needed with much computation per
 * line. */
#pragma once

#include <stdint.h>

#include "backend/base/math.h"

/* A walk over lines in four nested loops. The innermost has `inner` steps left, and so on. A walk beyond the last line
 * is harmless. */
typedef struct sluice_native_prefetch_s {
  const char* at;
  int64_t left;     /* lines */
  int64_t per_step; /* lines to prefetch in each step of the computation */
  int64_t inner, middle, outer;
  int64_t inners, middles, outers;                           /* initial values of the three above */
  int64_t to_inner, to_pre_activation, to_outer, to_outmost; /* bytes of a step, each added to the ones before */
} sluice_native_prefetch_t;

/* Returns a walk over `rows` rows of `row_bytes` bytes, `ld` bytes apart, that ends within `steps` steps. in_turns: 1:
 * alternate between rows as above; 0: row after row. */
static inline sluice_native_prefetch_t sluice_native_aim(const void* at, int64_t rows, int64_t row_bytes, int64_t ld,
                                                         int64_t steps, int in_turns) {
  enum { LINE_BYTES = 64, PAGE_BYTES = 4096, MOST_PAGES = 16 };
  const int64_t lines = sluice_ceil_div(row_bytes + (int64_t)((uintptr_t)at % LINE_BYTES), LINE_BYTES);
  sluice_native_prefetch_t p = {.at = at};
  if (in_turns) {
    /* The walk alternates between every `spread`-th row, so that no two share a page; the rows in between follow. */
    int64_t spread = 1;
    while (2 * spread <= rows && spread * ld < PAGE_BYTES) spread *= 2;
    const int64_t pages = rows / spread;
    const int64_t bands = sluice_ceil_div(pages, MOST_PAGES);
    const int64_t together = bands > 0 ? pages / bands : 0;
    p.inners = together;
    p.middles = lines;
    p.outers = spread;
    p.to_inner = spread * ld;
    p.to_pre_activation = LINE_BYTES - together * spread * ld;
    p.to_outer = ld - lines * LINE_BYTES;
    p.to_outmost = (together - 1) * spread * ld;
    p.left = bands * together * spread * lines; /* the remaining rows are not prefetched */
  } else {
    p.inners = lines;
    p.middles = rows;
    p.outers = 1;
    p.to_inner = LINE_BYTES;
    p.to_pre_activation = ld - lines * LINE_BYTES;
    p.left = rows * lines;
  }
  p.inner = p.inners;
  p.middle = p.middles;
  p.outer = p.outers;
  p.per_step = (p.left + steps - 1) / (steps > 0 ? steps : 1);
  return p;
}

/* Returns the line after `at`. `inner` lines of the innermost loop are left, including `at`. */
static inline __attribute__((always_inline)) const char* sluice_native_next_line(sluice_native_prefetch_t* p,
                                                                                 const char* at, int64_t* inner) {
  at += p->to_inner;
  if (--*inner > 0) return at;
  *inner = p->inners;
  at += p->to_pre_activation;
  if (--p->middle > 0) return at;
  p->middle = p->middles;
  at += p->to_outer;
  if (--p->outer > 0) return at;
  p->outer = p->outers;
  return at + p->to_outmost;
}
