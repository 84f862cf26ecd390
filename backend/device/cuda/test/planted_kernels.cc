// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/test/planted_kernels.h"

#include "backend/device/cuda/fake/lane_orders.h"
#include "backend/device/cuda/kernels/lanes.cu.h"

/* Lanes read what their neighbours wrote, with or without a fence. A shuffle is no fence. */
SLUICE_FN void neighbours(const planted_args_t& a, int64_t unit) {
  int32_t* const data = a.data + 32 * unit;
  per_lane<int32_t> sum;
  SLUICE_LANES(l) { data[l] = l; }
  if (!a.is_planted) warp_fence();
  SLUICE_LANES(l) { sum[l] = data[l ^ 1]; }
  const int32_t all = warp_fold(sum);
  if (!a.is_planted) warp_fence();
  SLUICE_LANES(l) {
    if (l == 0) data[0] = all;
  }
}
SLUICE_KERNEL(neighbours, planted_args_t)

/* One lane writes what all lanes read before. */
SLUICE_FN void overwritten(const planted_args_t& a, int64_t unit) {
  int32_t* const data = a.data + 32 * unit;
  per_lane<int32_t> x;
  SLUICE_LANES(l) { x[l] = data[31]; }
  if (!a.is_planted) warp_fence();
  SLUICE_LANES(l) {
    if (l == 31) data[l] = x[l] + 1;
  }
}
SLUICE_KERNEL(overwritten, planted_args_t)

/* All lanes write one word: their own number, or the same one. */
SLUICE_FN void same_word(const planted_args_t& a, int64_t unit) {
  SLUICE_LANES(l) { a.data[32 * unit] = a.is_planted ? l : 7; }
}
SLUICE_KERNEL(same_word, planted_args_t)

/* Every warp adds to one word, or each to its own. */
SLUICE_FN void warps_add(const planted_args_t& a, int64_t unit) {
  SLUICE_LANES(l) {
    if (l == 3) a.data[a.is_planted ? 0 : 32 * unit] += 1;
  }
}
SLUICE_KERNEL(warps_add, planted_args_t)

/* Every warp reads a word of the next one, which that one writes after fences. */
SLUICE_FN void next_warp(const planted_args_t& a, int64_t unit) {
  per_lane<int32_t> x;
  SLUICE_LANES(l) { x[l] = a.data[32 * ((unit + a.is_planted) % a.units) + l]; }
  warp_fence();
  SLUICE_LANES(l) { a.data[32 * unit + l] = x[l] + 1; }
}
SLUICE_KERNEL(next_warp, planted_args_t)

SLUICE_FN void foreign_register(const planted_args_t& a, int64_t unit) {
  per_lane<int32_t> x;
  SLUICE_LANES(l) { x[l] = l; }
  SLUICE_LANES(l) { a.data[32 * unit + l] = x[a.is_planted ? l ^ 1 : l]; }
}
SLUICE_KERNEL(foreign_register, planted_args_t)

/* A variable of the whole warp that one lane after the other changes has another value on a GPU. */
SLUICE_FN void first_lane(const planted_args_t& a, int64_t unit) {
  int32_t first = -1;
  SLUICE_LANES(l) {
    if (first < 0) first = a.is_planted ? l : 0;
  }
  SLUICE_LANES(l) { a.data[32 * unit + l] = first; }
}
SLUICE_KERNEL(first_lane, planted_args_t)

const planted_kernel_t* planted_kernels(void) {
#define PLANTED(name, problem) \
  { #name, sluice_##name##_on_cpu, problem }
  static const planted_kernel_t kernels[NUM_PLANTED] = {
      PLANTED(neighbours, "a race at"),     PLANTED(overwritten, "writes, and lane"),
      PLANTED(same_word, "writes another"), PLANTED(warps_add, "a race at"),
      PLANTED(next_warp, "a race at"),      PLANTED(foreign_register, "a register of another lane"),
      PLANTED(first_lane, "other bits at"),
  };
  return kernels;
}
