// SPDX-License-Identifier: Apache-2.0
/* Sums along rows and down columns. Lane l computes partial sum l of kernels.h, the elements l, l + 32, ... in order,
 * and partial sums are folded by halves. So the bits are those of every CPU version (the build has -fmad=false, because
 * a fused multiply-add would round once less). */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

/* out[i] (+)= sum over j of a[i, j] * b[i or 0, j] */
template <typename E>
SLUICE_FN void dot_rows(const sluice_dot_args_t& a, int64_t i) {
  typedef typename E::value value;
  per_lane<value> partial;
  SLUICE_LANES(lane) {
    value sum = 0;
    for (int64_t j = lane; j < a.width; j += 32)
      sum += load<E>(a.a, i * a.width + j) * load<E>(a.b, i * a.b_stride + j);
    partial[lane] = sum;
  }
  const value sum = warp_fold(partial);
  SLUICE_LANES(lane) {
    if (lane == 0) a.out[i] = (float)((a.accumulate ? (value)a.out[i] : (value)0) + sum);
  }
}
SLUICE_KERNELS_BY_DTYPE(dot_rows, sluice_dot_args_t)

enum { ROWS_AT_ONCE = 32 };

/* out[j] (+)= sum over i, in order, of weight[i] * data[i, j]: a lane per column. Each batch of rows is first loaded,
 * so that the loads overlap, and then summed. The order is that of one sum over all rows, so that sums in pieces, with
 * rows of zeros in between (capacities) or on a CPU, have the same bits; parallel partial sums would not. */
template <typename E>
SLUICE_FN void sum_columns(const sluice_column_sum_args_t& a, int64_t unit) {
  typedef typename E::value value;
  SLUICE_LANES(lane) {
    const int64_t j = unit * 32 + lane;
    if (j < a.width) {
      value sum = 0;
      if (a.accumulate) sum = a.out_f32 ? (value)((const float*)a.out)[j] : load<E>(a.out, j);
      for (int64_t first = 0; first < a.rows; first += ROWS_AT_ONCE) {
        const int count = a.rows - first < ROWS_AT_ONCE ? (int)(a.rows - first) : ROWS_AT_ONCE;
        value x[ROWS_AT_ONCE], w[ROWS_AT_ONCE];
        SLUICE_UNROLL
        for (int i = 0; i < ROWS_AT_ONCE; ++i) {
          const bool is_row = i < count;
          x[i] = is_row ? load<E>(a.data, (first + i) * a.data_stride + j) : (value)0;
          w[i] = is_row && a.weight != NULL ? (value)a.weight[first + i] : (value)1;
        }
        SLUICE_UNROLL
        for (int i = 0; i < ROWS_AT_ONCE; ++i) {
          if (i < count) sum += w[i] * x[i];
        }
      }
      if (a.out_f32) {
        ((float*)a.out)[j] = (float)sum;
      } else {
        store<E>(a.out, j, sum);
      }
    }
  }
}
SLUICE_KERNELS_BY_DTYPE(sum_columns, sluice_column_sum_args_t)

/* out[i, :] (+)= sums[i, :], a warp per row. */
template <typename E>
SLUICE_FN void round_rows(const sluice_round_args_t& a, int64_t i) {
  typedef typename E::value value;
  SLUICE_LANES(lane) {
    for (int64_t j = lane; j < a.width; j += 32) {
      const value before = a.accumulate ? load<E>(a.out, i * a.out_stride + j) : (value)0;
      store<E>(a.out, i * a.out_stride + j, before + (value)a.sums[i * a.width + j]);
    }
  }
}
SLUICE_KERNELS_BY_DTYPE(round_rows, sluice_round_args_t)
