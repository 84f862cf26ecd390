/* Each entry fills an argument struct and launches. */
#include "backend/device/cuda/cuda_kernels.h"

#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/device/cuda/cuda_launch.h"

/* Kernels of one name are numbered in the order f32, bf16, f16, f64, like SLUICE_DTYPE_*. */
static int32_t by_dtype(int32_t kernel, int32_t dtype) { return kernel + (dtype - SLUICE_DTYPE_F32); }

/* The widest access that divides all of these; a pointer counts as a number. */
static int64_t widest(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t all = a | b | c | d;
  int64_t piece = 16;
  while (piece > 1 && all % (uint64_t)piece != 0) piece /= 2;
  return piece;
}
static uint64_t number(const void* p) { return (uint64_t)(uintptr_t)p; }

static void gather_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                        int64_t src_stride, const int32_t* index, void* dst) {
  int64_t bytes = (int64_t)sluice_dtype_bytes(dtype);
  sluice_gather_args_t args = {.src = src,
                               .index = index,
                               .dst = dst,
                               .units = width > 0 ? rows : 0,
                               .row_bytes = width * bytes,
                               .src_stride_bytes = src_stride * bytes};
  args.piece = widest(number(src), number(dst), (uint64_t)args.row_bytes, (uint64_t)args.src_stride_bytes);
  sluice_cuda_launch(SLUICE_CUDA_gather_rows, stream, &args, args.units);
}

static void move_rows(sluice_stream_t stream, int64_t row_bytes, const sluice_row_run_t* runs, int64_t num_runs,
                      const void* src, void* dst) {
  sluice_move_args_t args = {.src = src, .dst = dst, .row_bytes = row_bytes};
  args.piece = widest(number(src), number(dst), (uint64_t)row_bytes, 0);
  if (row_bytes == 0) return;
  for (int64_t r = 0; r < num_runs; ++r) {
    if (runs[r].rows > 0) {
      args.units += runs[r].rows;
      args.runs[args.num_runs++] = (sluice_move_run_t){runs[r].src_row, runs[r].dst_row, args.units};
    }
    if (args.num_runs == SLUICE_CUDA_MAX_RUNS || r == num_runs - 1) {
      sluice_cuda_launch(SLUICE_CUDA_move_rows, stream, &args, args.units);
      args.num_runs = args.units = 0;
    }
  }
}

static void combine_rows(sluice_stream_t stream, int32_t dtype, int64_t num_tokens, int64_t top_k, int64_t width,
                         const void* rows, const int32_t* position, const float* scale, int64_t scale_t,
                         int64_t scale_k, void* out, int64_t out_stride) {
  uint64_t bytes = sluice_dtype_bytes(dtype);
  sluice_combine_args_t args = {.rows = rows,
                                .position = position,
                                .scale = scale,
                                .out = out,
                                .units = width > 0 ? num_tokens : 0,
                                .top_k = top_k,
                                .width = width,
                                .scale_t = scale_t,
                                .scale_k = scale_k,
                                .out_stride = out_stride};
  args.wide = widest(number(rows), number(out), (uint64_t)width * bytes, (uint64_t)out_stride * bytes) == 16;
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_combine_rows, dtype), stream, &args, args.units);
}

static void unit_forward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows, int64_t hidden,
                         void* pre, const void* b1, const void* b3, void* act) {
  uint64_t bytes = sluice_dtype_bytes(dtype);
  sluice_act_forward_args_t args = {.pre = pre,
                                    .b1 = b1,
                                    .b3 = b3,
                                    .act = act,
                                    .units = hidden > 0 ? rows : 0,
                                    .hidden = hidden,
                                    .activation = unit->activation,
                                    .gated = unit->gated,
                                    .alpha = unit->alpha,
                                    .limit = unit->limit,
                                    .offset = unit->offset};
  args.wide = unit->gated != SLUICE_GATED_INTERLEAVED &&
              widest(number(pre), number(act), (uint64_t)hidden * bytes, number(b1) | number(b3)) == 16;
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_activation_forward, dtype), stream, &args, args.units);
}

static void unit_backward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows,
                          int64_t hidden, const void* pre, const void* dact, const float* weight, void* dpre,
                          void* act_w, float* dweight) {
  const sluice_act_backward_args_t args = {.pre = pre,
                                           .dact = dact,
                                           .weight = weight,
                                           .dpre = dpre,
                                           .act_w = act_w,
                                           .dweight = dweight,
                                           .units = rows,
                                           .hidden = hidden,
                                           .activation = unit->activation,
                                           .gated = unit->gated,
                                           .alpha = unit->alpha,
                                           .limit = unit->limit,
                                           .offset = unit->offset};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_activation_backward, dtype), stream, &args, args.units);
}

static void activation_forward(sluice_stream_t stream, int32_t dtype, int32_t activation, int32_t gated, int64_t rows,
                               int64_t hidden, void* pre, const void* b1, const void* b3, void* act) {
  const sluice_unit_t unit = {activation, gated, 1, 1, 0};
  unit_forward(stream, dtype, &unit, rows, hidden, pre, b1, b3, act);
}

static void activation_backward(sluice_stream_t stream, int32_t dtype, int32_t activation, int32_t gated, int64_t rows,
                                int64_t hidden, const void* pre, const void* dact, const float* weight, void* dpre,
                                void* act_w, float* dweight) {
  const sluice_unit_t unit = {activation, gated, 1, 1, 0};
  unit_backward(stream, dtype, &unit, rows, hidden, pre, dact, weight, dpre, act_w, dweight);
}

static void add_bias(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, void* data, const void* bias) {
  const sluice_bias_args_t args = {.data = data, .bias = bias, .units = rows, .width = width};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_add_bias, dtype), stream, &args, args.units);
}

static void dot_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* a, const void* b,
                     int64_t b_stride, int32_t accumulate, float* out) {
  const sluice_dot_args_t args = {
      .a = a, .b = b, .out = out, .units = rows, .width = width, .b_stride = b_stride, .accumulate = accumulate};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_dot_rows, dtype), stream, &args, args.units);
}

static void sum_columns(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* data,
                        int64_t data_stride, const float* weight, int32_t accumulate, int32_t dtype_out, void* out) {
  const sluice_column_sum_args_t args = {.data = data,
                                         .weight = weight,
                                         .out = out,
                                         .units = sluice_ceil_div(width, SLUICE_CUDA_WARP),
                                         .rows = rows,
                                         .width = width,
                                         .data_stride = data_stride,
                                         .accumulate = accumulate,
                                         .out_f32 = dtype_out == SLUICE_DTYPE_F32};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_sum_columns, dtype), stream, &args, args.units);
}

static void round_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const float* sums,
                       int32_t accumulate, void* out, int64_t out_stride) {
  const sluice_round_args_t args = {
      .sums = sums, .out = out, .units = rows, .width = width, .out_stride = out_stride, .accumulate = accumulate};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_round_rows, dtype), stream, &args, args.units);
}

static void scale_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                       const float* weight, void* dst) {
  const sluice_scale_args_t args = {.src = src, .weight = weight, .dst = dst, .units = rows, .width = width};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_scale_rows, dtype), stream, &args, args.units);
}

static void gather_scalars(sluice_stream_t stream, int64_t count, int64_t top_k, const float* src, int64_t src_t,
                           int64_t src_k, const int32_t* route, float* dst) {
  const sluice_gather_scalars_args_t args = {.src = src,
                                             .route = route,
                                             .dst = dst,
                                             .units = sluice_ceil_div(count, SLUICE_CUDA_WARP),
                                             .count = count,
                                             .top_k = top_k,
                                             .src_t = src_t,
                                             .src_k = src_k};
  sluice_cuda_launch(SLUICE_CUDA_gather_scalars, stream, &args, args.units);
}

static void spread_scalars(sluice_stream_t stream, int64_t num_tokens, int64_t top_k, const float* rows,
                           const int32_t* position, float* out, int64_t out_t, int64_t out_k) {
  const sluice_spread_scalars_args_t args = {.rows = rows,
                                             .position = position,
                                             .out = out,
                                             .units = sluice_ceil_div(num_tokens * top_k, SLUICE_CUDA_WARP),
                                             .count = num_tokens * top_k,
                                             .top_k = top_k,
                                             .out_t = out_t,
                                             .out_k = out_k};
  sluice_cuda_launch(SLUICE_CUDA_spread_scalars, stream, &args, args.units);
}

sluice_status_t sluice_cuda_write_words(sluice_stream_t stream, void* to, const uint64_t* words, int64_t count) {
  for (int64_t at = 0; at < count; at += SLUICE_CUDA_MAX_WORDS) {
    sluice_words_args_t args = {.to = (uint64_t*)to + at, .count = count - at};
    if (args.count > SLUICE_CUDA_MAX_WORDS) args.count = SLUICE_CUDA_MAX_WORDS;
    args.units = sluice_ceil_div(args.count, SLUICE_CUDA_WARP);
    memcpy(args.words, words + at, (size_t)args.count * sizeof *words);
    sluice_cuda_launch(SLUICE_CUDA_write_words, stream, &args, args.units);
  }
  return sluice_cuda_launch_status();
}

const sluice_kernels_t* sluice_cuda_kernels(void) {
  static const sluice_kernels_t kernels = {
      .gather_rows = gather_rows,
      .move_rows = move_rows,
      .combine_rows = combine_rows,
      .activation_forward = activation_forward,
      .activation_backward = activation_backward,
      .add_bias = add_bias,
      .dot_rows = dot_rows,
      .sum_columns = sum_columns,
      .round_rows = round_rows,
      .scale_rows = scale_rows,
      .unit_forward = unit_forward,
      .unit_backward = unit_backward,
      .gather_scalars = gather_scalars,
      .spread_scalars = spread_scalars,
  };
  return &kernels;
}
