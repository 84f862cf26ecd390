// SPDX-License-Identifier: Apache-2.0
/* The arguments of the CUDA kernels: one struct each, passed by value, filled by the C launchers. A kernel works on
 * `units` (rows, tokens, tiles); one warp takes one unit at a time, and a unit's result does not depend on which. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_KERNELS_KERNEL_ARGS_H_
#define SLUICE_BACKEND_DEVICE_CUDA_KERNELS_KERNEL_ARGS_H_

#include <stdint.h>

#include "backend/device/adam_flags.h"
#include "backend/device/drop_counters.h"

enum {
  SLUICE_CUDA_WARP = 32,
  SLUICE_CUDA_BLOCK = 256,           /* threads: 8 warps */
  SLUICE_CUDA_MAX_RUNS = 128,        /* runs per launch of move_rows: 3 KiB of parameters, of the portable 4 KiB */
  SLUICE_CUDA_MAX_WORDS = 480,       /* words per launch of write_words */
  SLUICE_CUDA_UNIT_EXPERTS = 160,    /* experts per launch of an activation */
  SLUICE_CUDA_ROUTE_TILE = 256,      /* routes that one warp counts */
  SLUICE_CUDA_ADAM_TILE = 1024,      /* elements of a parameter per warp */
  SLUICE_CUDA_TOKEN_COPY_RUNS = 112, /* runs per launch of token_copy_place */
  SLUICE_CUDA_DECODED = 64,          /* weights per launch that decodes packed ones */
  SLUICE_CUDA_LEAST_BLOCK = 32,      /* block_cols is a multiple of this */
  SLUICE_CUDA_PER_BLOCK_BITS = 31
};

/* dst[i] = src[index[i]], rows of row_bytes; index -1: zeros; below -1: row -2 - index[i] of `other`. piece: bytes per
 * access, 16, 8, 4, 2 or 1, which divides everything. */
typedef struct sluice_gather_args_s {
  const void* src;
  const void* other;
  const int32_t* index;
  void* dst;
  int64_t units; /* rows */
  int64_t row_bytes;
  int64_t src_stride_bytes, other_stride_bytes;
  int64_t piece;
} sluice_gather_args_t;

/* dst[position[t, k]] = src[t] for each k. Position -1 and positions in [skip_first, skip_end) are not written; later
 * positions are reduced by skip_end - skip_first. piece: as above. */
typedef struct sluice_scatter_args_s {
  const void* src;
  const int32_t* position;
  void* dst;
  int64_t units; /* tokens */
  int64_t top_k;
  int64_t row_bytes;
  int64_t src_stride_bytes;
  int64_t piece;
  int64_t skip_first, skip_end;
} sluice_scatter_args_t;

typedef struct sluice_move_run_s {
  int64_t src_row, dst_row;
  int64_t end; /* rows of this run and the previous ones */
} sluice_move_run_t;

/* Row u of all runs together; run r has the rows [runs[r - 1].end, runs[r].end). */
typedef struct sluice_move_args_s {
  const void* src;
  void* dst;
  int64_t units; /* rows of all runs */
  int64_t row_bytes;
  int64_t piece;
  int64_t num_runs;
  sluice_move_run_t runs[SLUICE_CUDA_MAX_RUNS];
} sluice_move_args_t;

typedef struct sluice_combine_args_s {
  const void* rows;
  const int32_t* position;
  const float* scale; /* or NULL */
  void* out;
  int64_t units; /* tokens */
  int64_t top_k, width;
  int64_t scale_t, scale_k, out_stride;
  int64_t wide; /* 1: everything is 16-byte aligned and a whole number of 16 bytes */
} sluice_combine_args_t;

/* Rows of a chunk of several experts, in one launch. A tensor contains a chunk, or the whole pass by expert: then its
 * bit of by_pass is set, and row `unit` of the chunk is its row `unit` + shift. */
typedef struct sluice_unit_expert_s {
  int32_t end;   /* rows of this expert and the previous ones */
  int32_t shift; /* of its rows in tensors of the pass */
  const void* b1;
  const void* b3; /* or NULL */
} sluice_unit_expert_t;

enum { /* the tensors of both directions */
       SLUICE_CUDA_UNIT_PRE,
       SLUICE_CUDA_UNIT_ACT, /* forward */
       SLUICE_CUDA_UNIT_DACT,
       SLUICE_CUDA_UNIT_DPRE,
       SLUICE_CUDA_UNIT_ACT_W,
       SLUICE_CUDA_UNIT_WEIGHT,
       SLUICE_CUDA_UNIT_DWEIGHT,
       SLUICE_CUDA_UNIT_TENSORS
};

typedef struct sluice_unit_rows_s {
  int32_t by_pass;                           /* bits by SLUICE_CUDA_UNIT_* */
  int32_t num_experts;                       /* at least 1 */
  int32_t skipped[SLUICE_CUDA_UNIT_TENSORS]; /* bytes by which a row of the memory is wider than a row of the tensor */
  sluice_unit_expert_t experts[SLUICE_CUDA_UNIT_EXPERTS];
} sluice_unit_rows_t;

typedef struct sluice_act_forward_args_s {
  void* pre;
  void* act;
  int64_t units; /* rows */
  int64_t hidden;
  int32_t activation, gated;  /* gated: SLUICE_GATED_* */
  float alpha, limit, offset; /* for SWIGLU */
  sluice_unit_rows_t rows;
} sluice_act_forward_args_t;

typedef struct sluice_act_backward_args_s {
  const void* pre;
  const void* dact;
  const float* weight;
  void* dpre;
  void* act_w; /* or NULL */
  float* dweight;
  int64_t units; /* rows */
  int64_t hidden;
  int32_t activation, gated;  /* gated: SLUICE_GATED_* */
  float alpha, limit, offset; /* for SWIGLU */
  sluice_unit_rows_t rows;
} sluice_act_backward_args_t;

typedef struct sluice_bias_args_s {
  void* data;
  const void* bias;
  int64_t units; /* rows */
  int64_t width;
} sluice_bias_args_t;

typedef struct sluice_dot_args_s {
  const void* a;
  const void* b;
  float* out;
  int64_t units; /* rows */
  int64_t width, b_stride, accumulate;
} sluice_dot_args_t;

typedef struct sluice_column_sum_args_s {
  const void* data;
  const float* weight; /* or NULL */
  void* out;
  int64_t units; /* groups of 32 columns */
  int64_t rows, width, data_stride, accumulate;
  int64_t out_f32; /* 1: out is f32 for every dtype of the rows */
} sluice_column_sum_args_t;

typedef struct sluice_round_args_s {
  const float* sums;
  void* out;
  int64_t units; /* rows */
  int64_t width, out_stride, accumulate;
} sluice_round_args_t;

typedef struct sluice_scale_args_s {
  const void* src;
  const float* weight;
  void* dst;
  int64_t units; /* rows */
  int64_t width;
} sluice_scale_args_t;

/* dst[e * dst_stride + i * columns + j] = src[e + i * row_stride + j * col_stride] for e < count; strides in elements.
 */
typedef struct sluice_pack_args_s {
  const void* src;
  void* dst;
  int64_t units; /* rows of a matrix */
  int64_t columns, row_stride, col_stride, count, dst_stride;
  int64_t src_f32; /* 1: src is f32 for every dtype of dst */
} sluice_pack_args_t;

/* data[i, :] *= factor */
typedef struct sluice_scale_columns_args_s {
  void* data;
  int64_t units; /* rows */
  int64_t width, stride;
  float factor;
} sluice_scale_columns_args_t;

/* dst[i] = src[t, k] with route[i] = t * K + k, 0 if route[i] is -1. */
typedef struct sluice_gather_scalars_args_s {
  const float* src;
  const int32_t* route;
  float* dst;
  int64_t units; /* groups of 32 scalars */
  int64_t count, top_k, src_t, src_k;
} sluice_gather_scalars_args_t;

/* out[t, k] = rows[position[t * K + k]], or 0. */
typedef struct sluice_spread_scalars_args_s {
  const float* rows;
  const int32_t* position;
  float* out;
  int64_t units; /* groups of 32 scalars */
  int64_t count, top_k, out_t, out_k;
} sluice_spread_scalars_args_t;

/* to[i] = words[i]: writes small tables of pointers that a library reads on the device, without a copy to wait for. */
typedef struct sluice_words_args_s {
  uint64_t* to;
  int64_t units; /* groups of 32 words */
  int64_t count;
  uint64_t words[SLUICE_CUDA_MAX_WORDS];
} sluice_words_args_t;

/* Routing: a stable counting sort of routes (t, k) by expert slot. Kernels in order: route_count (a warp per tile of
 * routes), route_scan_tiles (a warp per 32 slots), route_scan_slots (one warp), route_place (a warp per tile). With a
 * capacity every slot has that many rows: its first routes take them, the others are dropped and counted, and rows
 * without a route keep the -1 that the caller wrote to token_of and route_of. */
typedef struct sluice_route_args_s {
  const void* ids;        /* expert of route (t, k) at t * ids_t + k * ids_k; -1: dropped */
  const int32_t* slot_of; /* [E] position of an expert in (rank, local index) order, or NULL: its id */
  int32_t* tile_counts;   /* [tiles, E] scratch, then [tiles] */
  int32_t* counts;        /* out [E] by slot */
  int32_t* offsets;       /* out [E + 1] by slot: first row; offsets[E] is the number of kept routes */
  int32_t* token_of;      /* out [kept] the token of each row: the index of a gather */
  int32_t* route_of;      /* out [kept] t * K + k of each row, or NULL; t is counted from first_token too */
  int32_t* first_bad;     /* out: the first route whose id is neither an expert's nor -1, INT32_MAX: none; or NULL */
  int32_t* position;      /* out [T * K] the row of each route, -1 if dropped */
  int64_t units;
  int64_t num_routes, top_k, num_experts;
  int64_t ids_t, ids_k;
  int64_t ids_64;         /* 1: i64 ids, 0: i32 */
  int64_t first_token;    /* of this chunk, added to tokens and routes */
  int64_t capacity;       /* rows of each slot; 0: as many as the slot has routes */
  int64_t* drop_counters; /* with a capacity: [SLUICE_NUM_DROP_COUNTERS], added to */
  int64_t begins;         /* 1: the first chunk of its forward, for the drop counters */
} sluice_route_args_t;

/* Counts routes per block of tokens and slot, for a cut by received rows: a warp per block. Block g of G has the tokens
 * [T g / G, T (g + 1) / G). */
typedef struct sluice_block_args_s {
  const void* ids;        /* as sluice_route_args_t */
  const int32_t* slot_of; /* [E] or NULL */
  int32_t* counts;        /* out [G, E + 1] by slot; the last entry of a block: its first route with an invalid id */
  int64_t units;          /* G */
  int64_t num_tokens, top_k, num_experts;
  int64_t ids_t, ids_k;
  int64_t ids_64; /* 1: i64 ids, 0: i32 */
} sluice_block_args_t;

/* Token copies (moe/routing/token_copies.h): one row per token and rank, shared by a chunk's routes of that token to
 * that rank. token_copy_ranks (a warp per 32 routes) computes the rank of each route and marks the first of its token
 * there; the routing above orders those by (rank, token), a row for each token copy; token_copy_index (per 32 routes)
 * and token_copy_table (per 32 pairs of token and rank) derive the tables. */
typedef struct sluice_token_copy_args_s {
  const void* ids;           /* as sluice_route_args_t */
  const int32_t* slot_of;    /* [E] the rank of an expert, or NULL: its id */
  int32_t* rank;             /* [T * K] of each route, -1 if dropped */
  int32_t* first;            /* [T * K] the same, but -1 if an earlier route of the token goes to that rank too */
  const int32_t* token_copy; /* [T * K] the routing's position of `first` */
  const int32_t* offsets;    /* [W + 1] the routing's: the first token copy of each rank */
  const int32_t* row;        /* [T * K] of each route in the chunk's sent order */
  int32_t* route_index;      /* out, by that row: token copy of its rank * K + k */
  int32_t* table;            /* out [T, W] the token copy of (token, rank), -1: none */
  int64_t units;
  int64_t num_routes, top_k, num_experts, num_ranks;
  int64_t ids_t, ids_k;
  int64_t ids_64; /* 1: i64 ids, 0: i32 */
} sluice_token_copy_args_t;

/* Routes of one source and one expert, in the sender's order. */
typedef struct sluice_token_copy_run_s {
  int32_t end;          /* routes of this run and the previous ones */
  int32_t route_index;  /* the first of its route indices */
  int32_t token_copies; /* of its source in this chunk: route indices outside of this range are ignored */
  int32_t token_copy;   /* the first of these, among all arrivals */
  int32_t row;          /* its first row in the chunk's expert order */
  int32_t origin;       /* its first entry in origin */
  int32_t from;         /* the first of the token copies among those that arrived by exchange; for own ones: in token */
  int32_t weight;       /* position of its route weights among the arrivals; for own ones: -1 */
} sluice_token_copy_run_t;

/* Converts received route indices, including own ones, to tables: a warp per 32 routes of all runs. */
typedef struct sluice_token_copy_place_args_s {
  const int32_t* route_index;
  const int32_t* token; /* of own token copies */
  int32_t* position;    /* out [token copies, K] row in the chunk's expert order; -1 before */
  int32_t*
      weight; /* out [token copies, K] position of the weight among the arrivals; for own ones: t * K + k; -1 before */
  int32_t* origin; /* out, by row: the received token copy, -1 if the index is invalid; for own ones: -2 - the token */
  int64_t units;
  int64_t count; /* routes of all runs */
  int64_t top_k, num_runs;
  sluice_token_copy_run_t runs[SLUICE_CUDA_TOKEN_COPY_RUNS];
} sluice_token_copy_place_args_t;

/* Shared by all kernels of Adam (adam_kernels.h); each uses some of the members. */
typedef struct sluice_adam_args_s {
  int64_t units, count;
  const void* grad;
  int32_t* flags; /* [SLUICE_ADAM_NUM_FLAGS] */
  float limit;
  int32_t num_parts; /* of grad, at distances of `stride` elements */
  int64_t stride;
  float* staged; /* gradients in f32: output of adam_stage and adam_sum, input of adam_update */
  float *master, *exp_avg, *exp_avg_sq;
  void* param;
  float grad_scale, l2, one_minus_beta1, one_minus_beta2, decay, epsilon_high, epsilon_low, step_high, step_low;
} sluice_adam_args_t;

enum { /* formats of packed weights, as SLUICE_WEIGHTS_* */
       SLUICE_CUDA_MXFP4 = 1,
       SLUICE_CUDA_FP8,
       SLUICE_CUDA_INT8,
       SLUICE_CUDA_INT4
};

typedef struct sluice_decode_weight_s {
  const void* codes;
  const void* scales;
  void* out;         /* [rows, cols], row after row */
  int64_t row_bytes; /* of codes: distance of two rows */
  int32_t end;       /* rows of this weight and the previous ones */
  int32_t scales_ld; /* distance of two rows of scales, in scales */
  int32_t half;      /* rows after which blocks of rows start again; 0: they do not */
  int32_t padding;
} sluice_decode_weight_t;

/* Decodes row u of all weights together: a warp per row. */
typedef struct sluice_decode_args_s {
  int64_t units; /* rows of all weights */
  int32_t cols, block_cols;
  uint32_t
      per_block; /* 2^SLUICE_CUDA_PER_BLOCK_BITS / (block_cols / SLUICE_CUDA_LEAST_BLOCK), rounded up. A column in units
                    of the least block, times this, has the column's block above those bits. This is exact as long as
                    that column times block_cols / SLUICE_CUDA_LEAST_BLOCK stays below 2^SLUICE_CUDA_PER_BLOCK_BITS */
  int32_t format; /* SLUICE_CUDA_MXFP4, ... */
  int32_t num_weights;
  sluice_decode_weight_t weights[SLUICE_CUDA_DECODED];
} sluice_decode_args_t;

#endif /* SLUICE_BACKEND_DEVICE_CUDA_KERNELS_KERNEL_ARGS_H_ */
