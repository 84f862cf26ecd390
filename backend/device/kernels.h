// SPDX-License-Identifier: Apache-2.0
/* The row kernels of a layer: everything that is not a GEMM.
 *
 * One table per device. Every entry takes the lane's native stream (NULL on a CPU) and is deterministic: sums run in a
 * fixed order in f32 (f64 for f64) and are rounded once. Rows are row-major; *_stride is in elements. Indices are i32.
 * dtype is the layer's: f32, bf16, f16, or f64 (finite differences). Route weights and gate scalars are f32 in layers
 * of every dtype, including f64 (they are inputs). Zero rows or zero columns are valid everywhere.
 *
 * The bits of a row do not depend on the number of rows in a call. A sum along a row consists of partial sums, folded
 * by halves, in an order that all versions keep. dot_rows has 32 of them, element j in partial j mod 32; dweight has
 * 256, column h in partial h mod 256, so that a GPU lane can sum eight adjacent columns. NaN and infinities
 * propagate. */
#pragma once

#include "backend/base/status.h"
#include "sluice/moe.h"

/* Consecutive rows that are copied from one buffer to another. */
typedef struct sluice_row_run_s {
  int64_t src_row;
  int64_t dst_row;
  int64_t rows;
} sluice_row_run_t;

/* The activation between the two GEMMs of an expert, with its parameters: act = f(x) v(u), without a gate f(x), where x
 * is the gate's pre-activation and u the other half.
 *   SWIGLU  f(x) = g sigmoid(alpha g), g = min(x, limit); v(u) = max(-limit, min(u, limit)) + offset
 *   others  f is the activation, v(u) = u */
typedef struct sluice_unit_s {
  int32_t activation; /* SLUICE_ACTIVATION_* */
  int32_t gated;      /* SLUICE_GATED_*; interleaved: x and u of a column are adjacent in pre, b1 and dpre */
  float alpha, limit, offset;
} sluice_unit_t;

/* The rows of several experts in a chunk, in sequence. */
typedef struct sluice_expert_rows_s {
  int64_t num_experts;
  const int64_t* rows;    /* [num_experts] */
  const int64_t* in_pass; /* [num_experts] the first row of each expert in tensors of the whole pass */
} sluice_expert_rows_t;

/* A tensor of rows for a chunk, or for the whole pass by expert. It may be stored in memory with wider rows: there an
 * expert's rows are contiguous, and begin where its first wider row would begin. */
typedef struct sluice_rows_at_s {
  void* data;
  int32_t is_of_pass;
  int64_t home_bytes; /* bytes of a row of that memory; 0: the tensor's own row size */
} sluice_rows_at_t;

typedef struct sluice_kernels_s {
  /* dst[i, :] = src[index[i], :], i in [0, rows); index -1: zeros. dst is packed (stride width). */
  void (*gather_rows)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                      int64_t src_stride, const int32_t* index, void* dst);

  /* The same for rows of two tensors: index below -1 is row -2 - index[i] of `other`. NULL on devices where a call for
   * each run of rows costs nothing. */
  void (*gather_rows_of_two)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                             int64_t src_stride, const void* other, int64_t other_stride, const int32_t* index,
                             void* dst);

  /* dst[position[t * K + k], :] = src[t, :]: does the work of gather_rows, but reads the row of a token once for its K
   * positions. NULL on devices whose caches hold the row meanwhile. No two positions are equal, except -1. Position -1
   * and positions in [skip_first, skip_end) are not written; later positions are reduced by skip_end - skip_first. dst
   * is packed. */
  void (*scatter_rows)(sluice_stream_t stream, int32_t dtype, int64_t num_tokens, int64_t top_k, int64_t width,
                       const void* src, int64_t src_stride, const int32_t* position, int64_t skip_first,
                       int64_t skip_end, void* dst);

  /* For each run: dst rows = src rows; both packed with row_bytes each. */
  void (*move_rows)(sluice_stream_t stream, int64_t row_bytes, const sluice_row_run_t* runs, int64_t num_runs,
                    const void* src, void* dst);

  /* out[t, :] = sum over k in order of scale[t, k] * rows[position[t * K + k], :]; position -1 contributes nothing (not
   * even NaN). scale has strides (scale_t, scale_k) or is NULL for 1. Rounded once. T tokens, out has out_stride. */
  void (*combine_rows)(sluice_stream_t stream, int32_t dtype, int64_t num_tokens, int64_t top_k, int64_t width,
                       const void* rows, const int32_t* position, const float* scale, int64_t scale_t, int64_t scale_k,
                       void* out, int64_t out_stride);

  /* rows[i, :] += bias, rounded to dtype. */
  void (*add_bias)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, void* data, const void* bias);

  /* out[i] = (accumulate ? out[i] : 0) + dot(a[i, :], b[i or 0, :]); b_stride 0 repeats one row (a bias). f32 out. a is
   * packed (stride width). */
  void (*dot_rows)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* a, const void* b,
                   int64_t b_stride, int32_t accumulate, float* out);

  /* out[j] = (accumulate ? out[j] : 0) + sum over i of weight[i] * data[i, j]; weight NULL = 1. data has row stride
   * data_stride. out has dtype_out (the layer's or f32) and stride 1; the sum is f32, starts from out[j] and is rounded
   * once: f32 sums in pieces have the bits of one sum. */
  void (*sum_columns)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* data,
                      int64_t data_stride, const float* weight, int32_t accumulate, int32_t dtype_out, void* out);

  /* out[i, :] = (accumulate ? out[i, :] : 0) + sums[i, :], rounded once to dtype. sums is f32 and packed (stride
   * width), out has out_stride. */
  void (*round_rows)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const float* sums,
                     int32_t accumulate, void* out, int64_t out_stride);

  /* dst[i, :] = weight[i] * src[i, :], rounded once; dst may be src. */
  void (*scale_rows)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                     const float* weight, void* dst);

  /* dst[e * dst_stride + i * columns + j] = src[e + i * row_stride + j * col_stride]: `count` matrices [rows, columns],
   * whose values alternate in src. Strides are in elements. src has dst's dtype, or is f32 and rounded once. NULL on
   * devices whose memory the host reads. */
  void (*pack_matrices)(sluice_stream_t stream, int32_t dtype, int32_t src_dtype, int64_t rows, int64_t columns,
                        const void* src, int64_t row_stride, int64_t col_stride, int64_t count, void* dst,
                        int64_t dst_stride);

  /* data[i, :] *= factor, rounded once; rows are `stride` apart. NULL on devices whose memory the host reads. */
  void (*scale_columns)(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, void* data, int64_t stride,
                        float factor);

  /* pre [rows, g*H] = [W1 x | W3 x] in place plus biases, which are kept in it; act [rows, H] = f(pre), gated:
   * f(pre[:, :H]) * v(pre[:, H:]). b1, b3: [H] or NULL (strides 1, layer dtype); interleaved b1 is [2H], b3 NULL. The
   * addition is rounded to dtype before the activation reads it, so that a backward that reloads `pre` sees the same
   * values. act may be pre when gated = 0 (then pre is not kept). */
  void (*unit_forward)(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows, int64_t hidden,
                       void* pre, const void* b1, const void* b3, void* act);

  /* Backward of the same, with the gate's scalar. In: pre [rows, g*H] (biases included), dact [rows, H] = dy W2 with dy
   * NOT yet multiplied by the route weight, weight [rows] f32. Out:
   *   dpre    [rows, g*H] = weight * d f / d pre * dact   (may be pre; may be dact when gated = 0)
   *   act_w   [rows, H]   = weight * act                   (so that dW2 = dy^T act_w with the raw dy; may be dact)
   *   dweight [rows] f32  = sum over h of dact * act, in f32, in the order above
   * act is what forward stored, to the bit. act_w may be NULL (weight gradients not wanted). The slope of a clamp at
   * its corner is 1. */
  void (*unit_backward)(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows, int64_t hidden,
                        const void* pre, const void* dact, const float* weight, void* dpre, void* act_w,
                        float* dweight);

  /* unit_forward and _backward for all experts' rows at once; NULL on devices on which separate calls cost nothing. b1,
   * b3: [num_experts] or NULL. act_w.data may be NULL. */
  void (*experts_forward)(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit,
                          const sluice_expert_rows_t* rows, int64_t hidden, sluice_rows_at_t pre,
                          const sluice_tensor_t* b1, const sluice_tensor_t* b3, sluice_rows_at_t act);
  void (*experts_backward)(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit,
                           const sluice_expert_rows_t* rows, int64_t hidden, sluice_rows_at_t pre,
                           sluice_rows_at_t dact, sluice_rows_at_t weight, sluice_rows_at_t dpre,
                           sluice_rows_at_t act_w, sluice_rows_at_t dweight);

  /* dst[i] = src[t, k] with route[i] = t * K + k, i in [0, count), 0 if route[i] is -1; src has strides (src_t,
   * src_k). */
  void (*gather_scalars)(sluice_stream_t stream, int64_t count, int64_t top_k, const float* src, int64_t src_t,
                         int64_t src_k, const int32_t* route, float* dst);

  /* The inverse: out[t, k] = rows[position[t * K + k]], 0 if the position is -1. out has strides (out_t, out_k). */
  void (*spread_scalars)(sluice_stream_t stream, int64_t num_tokens, int64_t top_k, const float* rows,
                         const int32_t* position, float* out, int64_t out_t, int64_t out_k);
} sluice_kernels_t;

/* The plain versions that follow the equations, and the vectorised ones that are compared with them. */
const sluice_kernels_t* sluice_cpu_kernels_ref(void);
const sluice_kernels_t* sluice_cpu_kernels(void);
