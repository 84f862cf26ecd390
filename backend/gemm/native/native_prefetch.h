// SPDX-License-Identifier: Apache-2.0
/* Asking for memory before it is needed. Internal to backend/gemm/native.
 *
 * The processor reads ahead in many pages at a time, but not far in each. So rows of several pages take turns, line by
 * line: measured on one Sapphire Rapids core, 13 GB/s of what is asked for so came from memory, and 9 row after row.
 * Walking so costs a few more instructions; where much is computed for each line, row after row comes soon enough. */
#ifndef SLUICE_BACKEND_GEMM_NATIVE_NATIVE_PREFETCH_H_
#define SLUICE_BACKEND_GEMM_NATIVE_NATIVE_PREFETCH_H_

#include <stdint.h>

#include "backend/base/math.h"

/* A walk over lines in four nested loops, of which the innermost makes `inner` more steps, and so on. Walking on
 * beyond the last line is harmless. */
typedef struct sluice_native_prefetch_s {
  const char* at;
  int64_t left;     /* lines */
  int64_t per_step; /* lines that are asked for in each step of what is computed meanwhile */
  int64_t inner, middle, outer;
  int64_t inners, middles, outers;                           /* what those begin with */
  int64_t to_inner, to_pre_activation, to_outer, to_outmost; /* bytes of a step, each on top of those before */
} sluice_native_prefetch_t;

/* Aims at `rows` of so many bytes, `ld` bytes from each other, that are all asked for within `steps` steps. in_turns:
 * as above, else row after row. */
static inline sluice_native_prefetch_t sluice_native_aim(const void* at, int64_t rows, int64_t row_bytes, int64_t ld,
                                                         int64_t steps, int in_turns) {
  enum { LINE_BYTES = 64, PAGE_BYTES = 4096, MOST_PAGES = 16 };
  const int64_t lines = sluice_ceil_div(row_bytes + (int64_t)((uintptr_t)at % LINE_BYTES), LINE_BYTES);
  sluice_native_prefetch_t p = {.at = at};
  if (in_turns) {
    /* Of rows that share a page, `spread` of them or more, one takes part; the next ones follow when it is over. */
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
    p.left = bands * together * spread * lines; /* what is left of the rows comes when it is read */
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

/* The line after `at`, where `inner` lines of the innermost loop are left, this one among them. */
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

#endif /* SLUICE_BACKEND_GEMM_NATIVE_NATIVE_PREFETCH_H_ */
