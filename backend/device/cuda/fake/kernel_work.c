// SPDX-License-Identifier: Apache-2.0
/* The amount of work of each kernel, from its arguments: the number of units (a warp takes one at a time), and the
 * length of the loop of one unit in elements, or in bytes for rows that are only moved. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/device/cuda/fake/fake_record.h"
#include "backend/device/cuda/kernels/kernel_args.h"

static int64_t tiles_of(const sluice_route_args_t* a) { return sluice_ceil_div(a->num_routes, SLUICE_CUDA_ROUTE_TILE); }

int sluice_fake_kernel_work(const char* name, const void* args, int64_t* out_units, int64_t* out_length) {
  static const char prefix[] = "sluice_";
  name += sizeof prefix - 1;
  *out_units = *out_length = 1;
#define WORK(kernel, type, extent)                       \
  if (strncmp(name, #kernel, sizeof #kernel - 1) == 0) { \
    const type* a = args;                                \
    *out_units = a->units;                               \
    *out_length = (extent);                              \
    return 1;                                            \
  }
  WORK(gather_rows, sluice_gather_args_t, a->row_bytes)
  WORK(scatter_rows, sluice_scatter_args_t, a->row_bytes)
  WORK(move_rows, sluice_move_args_t, a->row_bytes)
  WORK(combine_rows, sluice_combine_args_t, a->width)
  WORK(activation_forward, sluice_act_forward_args_t, a->hidden)
  WORK(activation_backward, sluice_act_backward_args_t, a->hidden)
  WORK(add_bias, sluice_bias_args_t, a->width)
  WORK(dot_rows, sluice_dot_args_t, a->width)
  WORK(sum_columns, sluice_column_sum_args_t, a->rows)
  WORK(round_rows, sluice_round_args_t, a->width)
  WORK(scale_rows, sluice_scale_args_t, a->width)
  WORK(pack_matrices, sluice_pack_args_t, a->columns * a->count)
  WORK(scale_columns, sluice_scale_columns_args_t, a->width)
  WORK(write_words, sluice_words_args_t, 32)
  WORK(gather_scalars, sluice_gather_scalars_args_t, 32)
  WORK(spread_scalars, sluice_spread_scalars_args_t, 32)
  WORK(route_count, sluice_route_args_t, sluice_min(a->num_routes, SLUICE_CUDA_ROUTE_TILE))
  WORK(route_place, sluice_route_args_t, sluice_min(a->num_routes, SLUICE_CUDA_ROUTE_TILE))
  WORK(route_scan_tiles, sluice_route_args_t, tiles_of(a))
  WORK(route_scan_slots, sluice_route_args_t, a->num_experts)
  WORK(route_blocks, sluice_block_args_t, a->num_tokens * a->top_k / a->units)
  WORK(token_copy_place, sluice_token_copy_place_args_t, 32)
  WORK(token_copy_, sluice_token_copy_args_t, 32)
  WORK(decode_, sluice_decode_args_t, a->cols)
  WORK(adam_, sluice_adam_args_t, SLUICE_CUDA_ADAM_TILE)
#undef WORK
  return 0;
}
