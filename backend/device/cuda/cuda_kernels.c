// SPDX-License-Identifier: Apache-2.0
/* The table of row kernels: each entry fills an argument struct and launches a kernel. */
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/base/tensor.h"
#include "backend/device/cuda/cuda_launch.h"
#include "backend/device/cuda/cuda_state.h"

/* Kernels of one name are numbered in the order f32, bf16, f16, f64, like SLUICE_DTYPE_*. */
static int32_t by_dtype(int32_t kernel, int32_t dtype) { return kernel + (dtype - SLUICE_DTYPE_F32); }

/* Returns the widest access that divides all of these; pointers are passed as numbers. */
static int64_t widest(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t all = a | b | c | d;
  int64_t piece = 16;
  while (piece > 1 && all % (uint64_t)piece != 0) piece /= 2;
  return piece;
}
static uint64_t number(const void* p) { return (uint64_t)(uintptr_t)p; }

static void gather_rows_of_two(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                               int64_t src_stride, const void* other, int64_t other_stride, const int32_t* index,
                               void* dst) {
  int64_t bytes = (int64_t)sluice_dtype_bytes(dtype);
  sluice_gather_args_t args = {.src = src,
                               .other = other,
                               .index = index,
                               .dst = dst,
                               .units = width > 0 ? rows : 0,
                               .row_bytes = width * bytes,
                               .src_stride_bytes = src_stride * bytes,
                               .other_stride_bytes = other_stride * bytes};
  args.piece = widest(number(src) | number(other), number(dst), (uint64_t)args.row_bytes,
                      (uint64_t)(args.src_stride_bytes | args.other_stride_bytes));
  sluice_cuda_launch(SLUICE_CUDA_gather_rows, stream, &args, args.units);
}

static void gather_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                        int64_t src_stride, const int32_t* index, void* dst) {
  gather_rows_of_two(stream, dtype, rows, width, src, src_stride, NULL, 0, index, dst);
}

static void scatter_rows(sluice_stream_t stream, int32_t dtype, int64_t num_tokens, int64_t top_k, int64_t width,
                         const void* src, int64_t src_stride, const int32_t* position, int64_t skip_first,
                         int64_t skip_end, void* dst) {
  int64_t bytes = (int64_t)sluice_dtype_bytes(dtype);
  sluice_scatter_args_t args = {.src = src,
                                .position = position,
                                .dst = dst,
                                .units = width > 0 ? num_tokens : 0,
                                .top_k = top_k,
                                .row_bytes = width * bytes,
                                .src_stride_bytes = src_stride * bytes,
                                .skip_first = skip_first,
                                .skip_end = skip_end};
  args.piece = widest(number(src), number(dst), (uint64_t)args.row_bytes, (uint64_t)args.src_stride_bytes);
  sluice_cuda_launch(SLUICE_CUDA_scatter_rows, stream, &args, args.units);
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

/* ---- activations ---- */

/* One call, in as many launches as its experts need: experts with the same shift and the same biases share an entry. */
typedef struct unit_call_s {
  int64_t first;    /* first row of the current launch, within the chunk */
  int64_t units;    /* its number of rows */
  int32_t is_apart; /* some tensor is stored in wider rows, so every expert needs its own entry */
  sluice_unit_rows_t* rows;
} unit_call_t;

static int is_full(const unit_call_t* call, int64_t shift, const void* b1, const void* b3) {
  const sluice_unit_rows_t* r = call->rows;
  if (r->num_experts < SLUICE_CUDA_UNIT_EXPERTS) return 0;
  const sluice_unit_expert_t* last = &r->experts[r->num_experts - 1];
  return call->is_apart || last->shift != shift + call->first || last->b1 != b1 || last->b3 != b3;
}

/* `shift`: of an expert's rows in tensors of the pass, relative to those of the chunk. */
static void add_expert(unit_call_t* call, int64_t count, int64_t shift, const void* b1, const void* b3) {
  sluice_unit_rows_t* r = call->rows;
  sluice_unit_expert_t* last = r->num_experts > 0 ? &r->experts[r->num_experts - 1] : NULL;
  /* Units count from the launch's first row, and so do rows in tensors of the chunk. */
  const int32_t own = (int32_t)(shift + call->first);
  call->units += count;
  if (last == NULL || call->is_apart || last->shift != own || last->b1 != b1 || last->b3 != b3)
    last = &r->experts[r->num_experts++];
  *last = (sluice_unit_expert_t){(int32_t)call->units, own, b1, b3};
}

/* Adds one of the call's tensors. */
static void add_tensor(unit_call_t* call, int tensor, sluice_rows_at_t at, int64_t row_bytes) {
  const int64_t skipped = at.home_bytes > 0 ? at.home_bytes - row_bytes : 0;
  call->rows->by_pass |= at.is_of_pass << tensor;
  call->rows->skipped[tensor] = (int32_t)skipped;
  call->is_apart |= skipped != 0;
}

/* Returns where the launch's rows begin in a tensor. */
static void* rows_from(const unit_call_t* call, int tensor, sluice_rows_at_t at, int64_t row_bytes) {
  if (at.data == NULL || at.is_of_pass) return at.data;
  return (char*)at.data + call->first * (row_bytes + call->rows->skipped[tensor]);
}

static uint64_t skips(const unit_call_t* call) {
  uint64_t all = 0;
  for (int t = 0; t < SLUICE_CUDA_UNIT_WEIGHT; ++t) all |= (uint64_t)call->rows->skipped[t]; /* scalars are not packs */
  return all;
}

static uint64_t biases(const unit_call_t* call) {
  uint64_t all = 0;
  for (int32_t e = 0; e < call->rows->num_experts; ++e) {
    all |= number(call->rows->experts[e].b1) | number(call->rows->experts[e].b3);
  }
  return all;
}

/* Returns the kernel of an activation if all rows are aligned to 16 bytes, else the general kernel. */
static int32_t unit_kernel(int32_t any, int32_t first_of_wide, int32_t dtype, int32_t activation, int64_t hidden,
                           uint64_t pointers) {
  const int is_wide = dtype != SLUICE_DTYPE_F64 && hidden % 8 == 0 && hidden < INT32_MAX / 2 && pointers % 16 == 0;
  return is_wide ? first_of_wide + 3 * activation + (dtype - SLUICE_DTYPE_F32) : by_dtype(any, dtype);
}

typedef struct forward_call_s {
  sluice_stream_t stream;
  int32_t dtype;
  int64_t hidden;
  sluice_rows_at_t pre, act;
  sluice_act_forward_args_t args;
} forward_call_t;

static void launch_forward(forward_call_t* c, unit_call_t* call) {
  const int64_t row = c->hidden * (int64_t)sluice_dtype_bytes(c->dtype);
  c->args.pre = rows_from(call, SLUICE_CUDA_UNIT_PRE, c->pre, c->args.gated ? 2 * row : row);
  c->args.act = rows_from(call, SLUICE_CUDA_UNIT_ACT, c->act, row);
  c->args.units = c->hidden > 0 ? call->units : 0;
  c->args.hidden = c->hidden;
  const uint64_t pointers = number(c->args.pre) | number(c->args.act) | biases(call) | skips(call);
  sluice_cuda_launch(unit_kernel(SLUICE_CUDA_activation_forward_any, SLUICE_CUDA_activation_forward_identity_f32,
                                 c->dtype, c->args.activation, c->hidden, pointers),
                     c->stream, &c->args, c->args.units);
  call->first += call->units;
  call->units = call->rows->num_experts = 0;
}

static void experts_forward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit,
                            const sluice_expert_rows_t* rows, int64_t hidden, sluice_rows_at_t pre,
                            const sluice_tensor_t* b1, const sluice_tensor_t* b3, sluice_rows_at_t act) {
  forward_call_t c = {.stream = stream, .dtype = dtype, .hidden = hidden, .pre = pre, .act = act};
  c.args.activation = unit->activation, c.args.gated = unit->gated;
  c.args.alpha = unit->alpha, c.args.limit = unit->limit, c.args.offset = unit->offset;
  const int64_t row = hidden * (int64_t)sluice_dtype_bytes(dtype);
  unit_call_t call = {.rows = &c.args.rows};
  add_tensor(&call, SLUICE_CUDA_UNIT_PRE, pre, unit->gated ? 2 * row : row);
  add_tensor(&call, SLUICE_CUDA_UNIT_ACT, act, row);
  for (int64_t e = 0, first = 0; e < rows->num_experts; first += rows->rows[e++]) {
    if (rows->rows[e] == 0) continue;
    const int64_t shift = c.args.rows.by_pass == 0 ? 0 : rows->in_pass[e] - first;
    const void* bias = b1 == NULL ? NULL : sluice_tensor_data(&b1[e]);
    const void* bias_up = b3 == NULL ? NULL : sluice_tensor_data(&b3[e]);
    if (is_full(&call, shift, bias, bias_up)) launch_forward(&c, &call);
    add_expert(&call, rows->rows[e], shift, bias, bias_up);
  }
  launch_forward(&c, &call);
}

typedef struct backward_call_s {
  sluice_stream_t stream;
  int32_t dtype;
  int64_t hidden;
  sluice_rows_at_t pre, dact, weight, dpre, act_w, dweight;
  sluice_act_backward_args_t args;
} backward_call_t;

static void launch_backward(backward_call_t* c, unit_call_t* call) {
  const int64_t row = c->hidden * (int64_t)sluice_dtype_bytes(c->dtype), pre_row = c->args.gated ? 2 * row : row;
  c->args.pre = rows_from(call, SLUICE_CUDA_UNIT_PRE, c->pre, pre_row);
  c->args.dact = rows_from(call, SLUICE_CUDA_UNIT_DACT, c->dact, row);
  c->args.weight = rows_from(call, SLUICE_CUDA_UNIT_WEIGHT, c->weight, sizeof(float));
  c->args.dpre = rows_from(call, SLUICE_CUDA_UNIT_DPRE, c->dpre, pre_row);
  c->args.act_w = rows_from(call, SLUICE_CUDA_UNIT_ACT_W, c->act_w, row);
  c->args.dweight = rows_from(call, SLUICE_CUDA_UNIT_DWEIGHT, c->dweight, sizeof(float));
  c->args.units = call->units;
  c->args.hidden = c->hidden;
  const uint64_t pointers =
      number(c->args.pre) | number(c->args.dact) | number(c->args.dpre) | number(c->args.act_w) | skips(call);
  sluice_cuda_launch(unit_kernel(SLUICE_CUDA_activation_backward_any, SLUICE_CUDA_activation_backward_identity_f32,
                                 c->dtype, c->args.activation, c->hidden, pointers),
                     c->stream, &c->args, c->args.units);
  call->first += call->units;
  call->units = call->rows->num_experts = 0;
}

static void experts_backward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit,
                             const sluice_expert_rows_t* rows, int64_t hidden, sluice_rows_at_t pre,
                             sluice_rows_at_t dact, sluice_rows_at_t weight, sluice_rows_at_t dpre,
                             sluice_rows_at_t act_w, sluice_rows_at_t dweight) {
  backward_call_t c = {.stream = stream,
                       .dtype = dtype,
                       .hidden = hidden,
                       .pre = pre,
                       .dact = dact,
                       .weight = weight,
                       .dpre = dpre,
                       .act_w = act_w,
                       .dweight = dweight};
  c.args.activation = unit->activation, c.args.gated = unit->gated;
  c.args.alpha = unit->alpha, c.args.limit = unit->limit, c.args.offset = unit->offset;
  const int64_t row = hidden * (int64_t)sluice_dtype_bytes(dtype), pre_row = unit->gated ? 2 * row : row;
  unit_call_t call = {.rows = &c.args.rows};
  add_tensor(&call, SLUICE_CUDA_UNIT_PRE, pre, pre_row);
  add_tensor(&call, SLUICE_CUDA_UNIT_DACT, dact, row);
  add_tensor(&call, SLUICE_CUDA_UNIT_WEIGHT, weight, sizeof(float));
  add_tensor(&call, SLUICE_CUDA_UNIT_DPRE, dpre, pre_row);
  add_tensor(&call, SLUICE_CUDA_UNIT_ACT_W, act_w, row);
  add_tensor(&call, SLUICE_CUDA_UNIT_DWEIGHT, dweight, sizeof(float));
  for (int64_t e = 0, first = 0; e < rows->num_experts; first += rows->rows[e++]) {
    if (rows->rows[e] == 0) continue;
    const int64_t shift = c.args.rows.by_pass == 0 ? 0 : rows->in_pass[e] - first;
    if (is_full(&call, shift, NULL, NULL)) launch_backward(&c, &call);
    add_expert(&call, rows->rows[e], shift, NULL, NULL);
  }
  launch_backward(&c, &call);
}

/* Describes a tensor that a kernel only reads. */
static sluice_rows_at_t read_at(const void* data) { return (sluice_rows_at_t){(void*)(uintptr_t)data, 0, 0}; }
static sluice_rows_at_t at(void* data) { return (sluice_rows_at_t){data, 0, 0}; }

static void unit_forward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows, int64_t hidden,
                         void* pre, const void* b1, const void* b3, void* act) {
  const sluice_expert_rows_t one = {1, &rows, NULL};
  const sluice_tensor_t first = {.data = (void*)(uintptr_t)b1}, second = {.data = (void*)(uintptr_t)b3};
  experts_forward(stream, dtype, unit, &one, hidden, at(pre), &first, &second, at(act));
}

static void unit_backward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows,
                          int64_t hidden, const void* pre, const void* dact, const float* weight, void* dpre,
                          void* act_w, float* dweight) {
  const sluice_expert_rows_t one = {1, &rows, NULL};
  experts_backward(stream, dtype, unit, &one, hidden, read_at(pre), read_at(dact), read_at(weight), at(dpre), at(act_w),
                   at(dweight));
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
  /* Contiguous rows are cut into shorter ones: a matrix of one expert has too few rows to fill a GPU. */
  for (; out_stride == width && width > 256 && width % 2 == 0; rows *= 2) out_stride = width /= 2;
  const sluice_round_args_t args = {
      .sums = sums, .out = out, .units = rows, .width = width, .out_stride = out_stride, .accumulate = accumulate};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_round_rows, dtype), stream, &args, args.units);
}

static void scale_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                       const float* weight, void* dst) {
  const sluice_scale_args_t args = {.src = src, .weight = weight, .dst = dst, .units = rows, .width = width};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_scale_rows, dtype), stream, &args, args.units);
}

static void pack_matrices(sluice_stream_t stream, int32_t dtype, int32_t src_dtype, int64_t rows, int64_t columns,
                          const void* src, int64_t row_stride, int64_t col_stride, int64_t count, void* dst,
                          int64_t dst_stride) {
  const sluice_pack_args_t args = {.src = src,
                                   .dst = dst,
                                   .units = rows,
                                   .columns = columns,
                                   .row_stride = row_stride,
                                   .col_stride = col_stride,
                                   .count = count,
                                   .dst_stride = dst_stride,
                                   .src_f32 = src_dtype == SLUICE_DTYPE_F32};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_pack_matrices, dtype), stream, &args, args.units);
}

static void scale_columns(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, void* data,
                          int64_t stride, float factor) {
  const sluice_scale_columns_args_t args = {
      .data = data, .units = rows, .width = width, .stride = stride, .factor = factor};
  sluice_cuda_launch(by_dtype(SLUICE_CUDA_scale_columns, dtype), stream, &args, args.units);
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
      .gather_rows_of_two = gather_rows_of_two,
      .scatter_rows = scatter_rows,
      .move_rows = move_rows,
      .combine_rows = combine_rows,
      .add_bias = add_bias,
      .dot_rows = dot_rows,
      .sum_columns = sum_columns,
      .round_rows = round_rows,
      .scale_rows = scale_rows,
      .pack_matrices = pack_matrices,
      .scale_columns = scale_columns,
      .unit_forward = unit_forward,
      .unit_backward = unit_backward,
      .experts_forward = experts_forward,
      .experts_backward = experts_backward,
      .gather_scalars = gather_scalars,
      .spread_scalars = spread_scalars,
  };
  return &kernels;
}
