// SPDX-License-Identifier: Apache-2.0
/* Records the reads and writes of each kernel, from its arguments and, for indexed rows, from the index. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/kernels/kernel_args.h"
#include "sluice/moe.h"

typedef const sluice_fake_moment_t* moment_t;

static void reads(moment_t at, const void* data, int64_t bytes) {
  if (bytes > 0) sluice_fake_cuda_note_at(at, data, (uint64_t)bytes, 0);
}
static void writes(moment_t at, const void* data, int64_t bytes) {
  if (bytes > 0) sluice_fake_cuda_note_at(at, data, (uint64_t)bytes, 1);
}
static const char* plus(const void* data, int64_t bytes) { return (const char*)data + bytes; }

static void gather_rows(moment_t at, const sluice_gather_args_t* a) {
  reads(at, a->index, a->units * 4);
  writes(at, a->dst, a->units * a->row_bytes);
  for (int64_t i = 0; i < a->units; ++i) {
    const int64_t from = a->index[i];
    if (from >= 0) reads(at, plus(a->src, from * a->src_stride_bytes), a->row_bytes);
    if (from < -1) reads(at, plus(a->other, (-2 - from) * a->other_stride_bytes), a->row_bytes);
  }
}

static void scatter_rows(moment_t at, const sluice_scatter_args_t* a) {
  reads(at, a->position, a->units * a->top_k * 4);
  for (int64_t t = 0; t < a->units; ++t) {
    reads(at, plus(a->src, t * a->src_stride_bytes), a->row_bytes);
    for (int64_t k = 0; k < a->top_k; ++k) {
      const int64_t row = a->position[t * a->top_k + k];
      if (row < 0 || (row >= a->skip_first && row < a->skip_end)) continue;
      const int64_t to = row < a->skip_end ? row : row - (a->skip_end - a->skip_first);
      writes(at, plus(a->dst, to * a->row_bytes), a->row_bytes);
    }
  }
}

static void move_rows(moment_t at, const sluice_move_args_t* a) {
  for (int64_t r = 0, first = 0; r < a->num_runs; first = a->runs[r++].end) {
    int64_t bytes = (a->runs[r].end - first) * a->row_bytes;
    reads(at, plus(a->src, a->runs[r].src_row * a->row_bytes), bytes);
    writes(at, plus(a->dst, a->runs[r].dst_row * a->row_bytes), bytes);
  }
}

static void combine_rows(moment_t at, const sluice_combine_args_t* a, int64_t element) {
  reads(at, a->position, a->units * a->top_k * 4);
  for (int64_t t = 0; t < a->units; ++t) {
    writes(at, plus(a->out, t * a->out_stride * element), a->width * element);
    for (int64_t k = 0; k < a->top_k; ++k) {
      int64_t row = a->position[t * a->top_k + k];
      if (row < 0) continue;
      reads(at, plus(a->rows, row * a->width * element), a->width * element);
      if (a->scale != NULL) reads(at, a->scale + t * a->scale_t + k * a->scale_k, 4);
    }
  }
}

typedef void (*note_fn_t)(moment_t at, const void* data, int64_t bytes);

/* All rows of an activation in one of its tensors. */
static void unit_rows(moment_t at, note_fn_t note, const sluice_unit_rows_t* rows, int tensor, const void* data,
                      int64_t row_bytes) {
  int64_t first = 0;
  for (int32_t e = 0; data != NULL && e < rows->num_experts; first = rows->experts[e++].end) {
    const int64_t row = first + (rows->by_pass >> tensor & 1 ? rows->experts[e].shift : 0);
    note(at, plus(data, row * (row_bytes + rows->skipped[tensor])), (rows->experts[e].end - first) * row_bytes);
  }
}

static void activation_forward(moment_t at, const sluice_act_forward_args_t* a, int64_t element) {
  const int64_t row = a->hidden * element, pre_row = a->gated ? 2 * row : row;
  int has_bias = 0;
  for (int32_t e = 0; e < a->rows.num_experts; ++e) {
    const sluice_unit_expert_t* x = &a->rows.experts[e];
    if (x->b1 != NULL) reads(at, x->b1, a->gated == SLUICE_GATED_INTERLEAVED ? pre_row : row);
    if (x->b3 != NULL) reads(at, x->b3, row);
    has_bias |= x->b1 != NULL || x->b3 != NULL;
  }
  unit_rows(at, reads, &a->rows, SLUICE_CUDA_UNIT_PRE, a->pre, pre_row);
  if (has_bias) unit_rows(at, writes, &a->rows, SLUICE_CUDA_UNIT_PRE, a->pre, pre_row);
  unit_rows(at, writes, &a->rows, SLUICE_CUDA_UNIT_ACT, a->act, row);
}

static void activation_backward(moment_t at, const sluice_act_backward_args_t* a, int64_t element) {
  const int64_t row = a->hidden * element, pre_row = a->gated ? 2 * row : row;
  unit_rows(at, reads, &a->rows, SLUICE_CUDA_UNIT_PRE, a->pre, pre_row);
  unit_rows(at, reads, &a->rows, SLUICE_CUDA_UNIT_DACT, a->dact, row);
  unit_rows(at, reads, &a->rows, SLUICE_CUDA_UNIT_WEIGHT, a->weight, 4);
  unit_rows(at, writes, &a->rows, SLUICE_CUDA_UNIT_DPRE, a->dpre, pre_row);
  unit_rows(at, writes, &a->rows, SLUICE_CUDA_UNIT_ACT_W, a->act_w, row);
  unit_rows(at, writes, &a->rows, SLUICE_CUDA_UNIT_DWEIGHT, a->dweight, 4);
}

static void dot_rows(moment_t at, const sluice_dot_args_t* a, int64_t element) {
  reads(at, a->a, a->units * a->width * element);
  for (int64_t i = 0; i < (a->b_stride == 0 ? 1 : a->units); ++i) {
    reads(at, plus(a->b, i * a->b_stride * element), a->width * element);
  }
  writes(at, a->out, a->units * 4);
}

static void sum_columns(moment_t at, const sluice_column_sum_args_t* a, int64_t element) {
  for (int64_t i = 0; i < a->rows; ++i) reads(at, plus(a->data, i * a->data_stride * element), a->width * element);
  if (a->weight != NULL) reads(at, a->weight, a->rows * 4);
  writes(at, a->out, a->width * (a->out_f32 ? 4 : element));
}

static void gather_scalars(moment_t at, const sluice_gather_scalars_args_t* a) {
  reads(at, a->route, a->count * 4);
  writes(at, a->dst, a->count * 4);
  for (int64_t i = 0; i < a->count; ++i) {
    if (a->route[i] < 0) continue;
    reads(at, a->src + a->route[i] / a->top_k * a->src_t + a->route[i] % a->top_k * a->src_k, 4);
  }
}

static void spread_scalars(moment_t at, const sluice_spread_scalars_args_t* a) {
  reads(at, a->position, a->count * 4);
  for (int64_t i = 0; i < a->count; ++i) {
    if (a->position[i] >= 0) reads(at, a->rows + a->position[i], 4);
    writes(at, a->out + i / a->top_k * a->out_t + i % a->top_k * a->out_k, 4);
  }
}

static void reads_ids(moment_t at, const void* ids, int64_t bytes, int64_t num_routes, int64_t top_k, int64_t t,
                      int64_t k) {
  for (int64_t r = 0; r < num_routes; ++r) reads(at, plus(ids, (r / top_k * t + r % top_k * k) * bytes), bytes);
}

/* The four kernels of a routing run in sequence on one stream: the union of their writes is recorded for each. */
static void route(moment_t at, const sluice_route_args_t* a) {
  reads_ids(at, a->ids, a->ids_64 ? 8 : 4, a->num_routes, a->top_k, a->ids_t, a->ids_k);
  if (a->slot_of != NULL) reads(at, a->slot_of, a->num_experts * 4);
  writes(at, a->tile_counts, sluice_ceil_div(a->num_routes, SLUICE_CUDA_ROUTE_TILE) * (a->num_experts + 1) * 4);
  writes(at, a->counts, a->num_experts * 4);
  writes(at, a->offsets, (a->num_experts + 1) * 4);
  int64_t rows = a->capacity > 0 ? a->capacity * a->num_experts : a->num_routes;
  writes(at, a->token_of, rows * 4);
  if (a->route_of != NULL) writes(at, a->route_of, rows * 4);
  if (a->drop_counters != NULL) writes(at, a->drop_counters, SLUICE_NUM_DROP_COUNTERS * 8);
  if (a->first_bad != NULL) writes(at, a->first_bad, 4);
  writes(at, a->position, a->num_routes * 4);
}

static void route_blocks(moment_t at, const sluice_block_args_t* a) {
  reads_ids(at, a->ids, a->ids_64 ? 8 : 4, a->num_tokens * a->top_k, a->top_k, a->ids_t, a->ids_k);
  if (a->slot_of != NULL) reads(at, a->slot_of, a->num_experts * 4);
  writes(at, a->counts, a->units * (a->num_experts + 1) * 4);
}

static void token_copies(moment_t at, const sluice_token_copy_args_t* a, const char* name) {
  if (strcmp(name, "token_copy_ranks") == 0) {
    reads_ids(at, a->ids, a->ids_64 ? 8 : 4, a->num_routes, a->top_k, a->ids_t, a->ids_k);
    if (a->slot_of != NULL) reads(at, a->slot_of, a->num_experts * 4);
    writes(at, a->rank, a->num_routes * 4);
    writes(at, a->first, a->num_routes * 4);
    return;
  }
  reads(at, a->first, a->num_routes * 4);
  reads(at, a->token_copy, a->num_routes * 4);
  if (strcmp(name, "token_copy_table") == 0) {
    writes(at, a->table, a->num_routes / a->top_k * a->num_ranks * 4);
    return;
  }
  reads(at, a->rank, a->num_routes * 4);
  reads(at, a->offsets, a->num_ranks * 4);
  reads(at, a->row, a->num_routes * 4);
  for (int64_t r = 0; r < a->num_routes; ++r) {
    if (a->rank[r] >= 0) writes(at, a->route_index + a->row[r], 4);
  }
}

static void token_copy_place(moment_t at, const sluice_token_copy_place_args_t* a) {
  for (int64_t r = 0, first = 0; r < a->num_runs; first = a->runs[r++].end) {
    const sluice_token_copy_run_t* run = &a->runs[r];
    int64_t rows = run->end - first;
    reads(at, a->route_index + run->route_index, rows * 4);
    writes(at, a->origin + run->origin, rows * 4);
    for (int64_t i = 0; i < rows; ++i) {
      int64_t index = a->route_index[run->route_index + i], entry = run->token_copy * a->top_k + index;
      if (index < 0 || index / a->top_k >= run->token_copies) continue;
      writes(at, a->position + entry, 4);
      writes(at, a->weight + entry, 4);
      if (run->weight < 0) reads(at, a->token + run->from + index / a->top_k, 4);
    }
  }
}

static void adam(moment_t at, const sluice_adam_args_t* a, const char* name, int64_t element) {
  const int is_sum = strncmp(name, "adam_sum", 8) == 0;
  if (strncmp(name, "adam_update", 11) != 0 && !is_sum) reads(at, a->grad, a->count * element);
  for (int32_t part = 0; is_sum && part < a->num_parts; ++part) {
    reads(at, plus(a->grad, part * a->stride * element), a->count * element);
  }
  if (strncmp(name, "adam_look", 9) == 0) writes(at, a->flags, SLUICE_ADAM_NUM_FLAGS * 4);
  if (strncmp(name, "adam_stage", 10) == 0 || is_sum) writes(at, a->staged, a->count * 4);
  if (strncmp(name, "adam_update", 11) != 0) return;
  reads(at, a->staged, a->count * 4);
  writes(at, a->master, a->count * 4);
  writes(at, a->exp_avg, a->count * 4);
  writes(at, a->exp_avg_sq, a->count * 4);
  writes(at, a->param, a->count * element);
}

static void decode(moment_t at, const sluice_decode_args_t* a, int64_t element) {
  const int32_t bits = a->format == SLUICE_CUDA_MXFP4 || a->format == SLUICE_CUDA_INT4 ? 4 : 8;
  const int32_t block_rows = a->format == SLUICE_CUDA_FP8 ? 128 : 1;
  const int64_t scale = a->format == SLUICE_CUDA_MXFP4 ? 1 : a->format == SLUICE_CUDA_FP8 ? 4 : 2;
  const int64_t row_of_scales = sluice_ceil_div(a->cols, a->block_cols) * scale;
  for (int32_t w = 0, first = 0; w < a->num_weights; first = a->weights[w++].end) {
    const sluice_decode_weight_t* x = &a->weights[w];
    const int64_t rows = x->end - first;
    int64_t blocks = sluice_ceil_div(rows, block_rows);
    if (x->half > 0 && rows > x->half) {
      blocks = sluice_ceil_div(x->half, block_rows) + sluice_ceil_div(rows - x->half, block_rows);
    }
    for (int64_t r = 0; r < rows; ++r) reads(at, plus(x->codes, r * x->row_bytes), (int64_t)a->cols * bits / 8);
    for (int64_t b = 0; b < blocks; ++b) reads(at, plus(x->scales, b * x->scales_ld * scale), row_of_scales);
    writes(at, x->out, rows * a->cols * element);
  }
}

static int64_t element_of(const char* name) {
  const char* dtype = strrchr(name, '_');
  if (strcmp(dtype, "_f64") == 0) return 8;
  return strcmp(dtype, "_f32") == 0 ? 4 : 2;
}

void sluice_fake_note_kernel(const char* name, const void* args, const sluice_fake_moment_t* at) {
  static const char prefix[] = "sluice_";
  name += sizeof prefix - 1;
#define IS(kernel) (strncmp(name, #kernel, sizeof #kernel - 1) == 0)
  if (IS(gather_rows)) gather_rows(at, args);
  if (IS(scatter_rows)) scatter_rows(at, args);
  if (IS(move_rows)) move_rows(at, args);
  if (IS(combine_rows)) combine_rows(at, args, element_of(name));
  if (IS(activation_forward)) activation_forward(at, args, element_of(name));
  if (IS(activation_backward)) activation_backward(at, args, element_of(name));
  if (IS(dot_rows)) dot_rows(at, args, element_of(name));
  if (IS(sum_columns)) sum_columns(at, args, element_of(name));
  if (IS(gather_scalars)) gather_scalars(at, args);
  if (IS(spread_scalars)) spread_scalars(at, args);
  if (IS(route_count) || IS(route_scan) || IS(route_place)) route(at, args);
  if (IS(decode_)) decode(at, args, element_of(name));
  if (IS(adam_)) adam(at, args, name, element_of(name));
  if (IS(route_blocks)) route_blocks(at, args);
  if (IS(token_copy_ranks) || IS(token_copy_index) || IS(token_copy_table)) token_copies(at, args, name);
  if (IS(token_copy_place)) token_copy_place(at, args);
  if (IS(add_bias)) {
    const sluice_bias_args_t* a = args;
    writes(at, a->data, a->units * a->width * element_of(name));
    reads(at, a->bias, a->width * element_of(name));
  }
  if (IS(round_rows)) {
    const sluice_round_args_t* a = args;
    reads(at, a->sums, a->units * a->width * 4);
    for (int64_t i = 0; i < a->units; ++i) {
      writes(at, plus(a->out, i * a->out_stride * element_of(name)), a->width * element_of(name));
    }
  }
  if (IS(scale_rows)) {
    const sluice_scale_args_t* a = args;
    reads(at, a->src, a->units * a->width * element_of(name));
    reads(at, a->weight, a->units * 4);
    writes(at, a->dst, a->units * a->width * element_of(name));
  }
  if (IS(pack_matrices)) {
    const sluice_pack_args_t* a = args;
    const int64_t from = a->src_f32 ? 4 : element_of(name), to = element_of(name);
    for (int64_t i = 0; i < a->units; ++i) {
      for (int64_t j = 0; j < a->columns; ++j)
        reads(at, plus(a->src, (i * a->row_stride + j * a->col_stride) * from), a->count * from);
    }
    for (int64_t e = 0; e < a->count; ++e) writes(at, plus(a->dst, e * a->dst_stride * to), a->units * a->columns * to);
  }
  if (IS(scale_columns)) {
    const sluice_scale_columns_args_t* a = args;
    for (int64_t i = 0; i < a->units; ++i)
      writes(at, plus(a->data, i * a->stride * element_of(name)), a->width * element_of(name));
  }
  if (IS(write_words)) {
    const sluice_words_args_t* a = args;
    writes(at, a->to, a->count * 8);
  }
#undef IS
}
