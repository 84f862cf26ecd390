// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/native/native_runs.h"

#include <stddef.h>

static uint64_t ends_of(int64_t first, int64_t last) { return (uint64_t)first << 32 | (uint64_t)last; }
static int64_t first_of(uint64_t ends) { return (int64_t)(ends >> 32); }
static int64_t last_of(uint64_t ends) { return (int64_t)(ends & UINT32_MAX); }

void sluice_runs_set(const sluice_runs_t* runs, int index, int64_t first, int64_t last) {
  atomic_init(&runs->runs[index].ends, ends_of(first, last));
}

/* Returns the GEMM of a panel. GEMMs without panels are never returned. */
static int64_t gemm_of(const sluice_runs_t* runs, int64_t panel) {
  int64_t low = 0;
  int64_t high = runs->num_gemms; /* begins[low] <= panel < begins[high] */
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (runs->begins[middle] <= panel) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/* Half of the remaining panels, so that other threads can take the rest; never leaves less than `least`. */
static int64_t share_of(int64_t left, int64_t least) {
  const int64_t half = (left + 1) / 2;
  const int64_t share = half > least ? half : least;
  return left - share < least ? left : share;
}

/* Takes from the front of the thread's own run. A single thread takes all panels of a GEMM at once. */
static int take_own(const sluice_runs_t* runs, sluice_run_t* run, sluice_piece_t* out_piece) {
  uint64_t ends = atomic_load_explicit(&run->ends, memory_order_relaxed);
  for (;;) {
    const int64_t first = first_of(ends);
    const int64_t last = last_of(ends);
    if (first >= last) return 0;
    const int64_t problem = gemm_of(runs, first);
    const int64_t share = runs->num_runs == 1 ? last - first : share_of(last - first, runs->least[problem]);
    int64_t end = first + share;
    if (end > runs->begins[problem + 1]) end = runs->begins[problem + 1];
    if (!atomic_compare_exchange_weak_explicit(&run->ends, &ends, ends_of(end, last), memory_order_relaxed,
                                               memory_order_relaxed)) {
      continue;
    }
    *out_piece = (sluice_piece_t){problem, first - runs->begins[problem], end - runs->begins[problem], -1, 0};
    if (end < last) {
      out_piece->next_gemm = gemm_of(runs, end);
      out_piece->next_first = end - runs->begins[out_piece->next_gemm];
    }
    return 1;
  }
}

static int take_from(const sluice_runs_t* runs, sluice_run_t* run, sluice_piece_t* out_piece) {
  uint64_t ends = atomic_load_explicit(&run->ends, memory_order_relaxed);
  for (;;) {
    const int64_t first = first_of(ends);
    const int64_t last = last_of(ends);
    if (first >= last) return 0;
    const int64_t problem = gemm_of(runs, last - 1);
    int64_t begin = last - share_of(last - first, runs->least[problem]);
    if (begin < runs->begins[problem]) begin = runs->begins[problem];
    if (!atomic_compare_exchange_weak_explicit(&run->ends, &ends, ends_of(first, begin), memory_order_relaxed,
                                               memory_order_relaxed)) {
      continue;
    }
    *out_piece = (sluice_piece_t){problem, begin - runs->begins[problem], last - runs->begins[problem], -1, 0};
    return 1;
  }
}

int sluice_runs_take(const sluice_runs_t* runs, int index, sluice_piece_t* out_piece) {
  if (take_own(runs, &runs->runs[index], out_piece)) return 1;
  for (;;) {
    sluice_run_t* longest = NULL;
    int64_t most = 0;
    for (int i = 0; i < runs->num_runs; ++i) {
      const uint64_t ends = atomic_load_explicit(&runs->runs[i].ends, memory_order_relaxed);
      const int64_t left = last_of(ends) - first_of(ends);
      if (left <= most) continue;
      most = left;
      longest = &runs->runs[i];
    }
    if (longest == NULL) return 0;
    if (take_from(runs, longest, out_piece)) return 1;
  }
}
