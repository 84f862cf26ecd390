// SPDX-License-Identifier: Apache-2.0
/* Token copies on the device: a part of sluice_cuda_routing_kernels. */
#include "backend/base/math.h"
#include "backend/device/cuda/cuda_launch.h"
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/cuda_routing.h"

/* ---- numbering ---- */

/* The scratch consists of ranks by expert; offsets of one chunk's token copies; rank, first and token copy of its
 * routes; its tiles. */
static uint64_t offsets_bytes(int32_t num_ranks) {
  return sluice_align_up(((uint64_t)num_ranks + 1) * sizeof(int32_t));
}
static uint64_t routes_bytes(int64_t num_routes) { return sluice_align_up((uint64_t)num_routes * sizeof(int32_t)); }

uint64_t sluice_cuda_token_copy_scratch_bytes(int64_t num_routes, int32_t num_experts, int32_t num_ranks) {
  return sluice_cuda_table_bytes(num_experts) + offsets_bytes(num_ranks) + 3 * routes_bytes(num_routes) +
         sluice_align_up(sluice_cuda_route_scratch_bytes(num_routes, num_ranks));
}

/* The parts of the scratch for the routes of a chunk, in this order. */
typedef struct scratch_s {
  int32_t *offsets, *rank, *first, *token_copy, *tiles;
} scratch_t;

static scratch_t scratch_in(void* scratch, int32_t num_experts, int32_t num_ranks, int64_t num_routes) {
  char* at = (char*)scratch + sluice_cuda_table_bytes(num_experts);
  char* routes = at + offsets_bytes(num_ranks);
  uint64_t bytes = routes_bytes(num_routes);
  return (scratch_t){(int32_t*)(void*)at, (int32_t*)(void*)routes, (int32_t*)(void*)(routes + bytes),
                     (int32_t*)(void*)(routes + 2 * bytes), (int32_t*)(void*)(routes + 3 * bytes)};
}

static void number_chunk(sluice_stream_t stream, const sluice_device_token_copies_t* p, int32_t chunk,
                         const int32_t* table) {
  int64_t first = p->first_token[chunk], tokens = p->first_token[chunk + 1] - first, routes = tokens * p->top_k;
  const scratch_t scratch = scratch_in(p->scratch, p->num_experts, p->num_ranks, routes);
  int32_t* counts = p->counts + (int64_t)chunk * (p->num_ranks + 1);
  sluice_token_copy_args_t args = {
      .ids = (const char*)p->ids + first * p->ids_t * (p->ids_64 ? 8 : 4),
      .slot_of = table,
      .rank = scratch.rank,
      .first = scratch.first,
      .token_copy = scratch.token_copy,
      .offsets = scratch.offsets,
      .row = p->position + first * p->top_k,
      .route_index = p->route_index + first * p->top_k,
      .table = p->position_of_token + first * p->num_ranks,
      .units = sluice_ceil_div(routes, SLUICE_CUDA_WARP),
      .num_routes = routes,
      .top_k = p->top_k,
      .num_experts = p->num_experts,
      .num_ranks = p->num_ranks,
      .ids_t = p->ids_t,
      .ids_k = p->ids_k,
      .ids_64 = p->ids_64,
  };
  const sluice_route_args_t sort = {
      .ids = scratch.first,
      .tile_counts = scratch.tiles,
      .counts = counts,
      .offsets = scratch.offsets,
      .token_of = p->token + first * p->most,
      .first_bad = counts + p->num_ranks,
      .position = scratch.token_copy,
      .num_routes = routes,
      .top_k = p->top_k,
      .num_experts = p->num_ranks,
      .ids_t = p->top_k,
      .ids_k = 1,
      .first_token = first,
  };
  sluice_cuda_launch(SLUICE_CUDA_token_copy_ranks, stream, &args, args.units);
  sluice_cuda_route(stream, &sort);
  sluice_cuda_launch(SLUICE_CUDA_token_copy_index, stream, &args, args.units);
  args.units = sluice_ceil_div(tokens * p->num_ranks, SLUICE_CUDA_WARP);
  sluice_cuda_launch(SLUICE_CUDA_token_copy_table, stream, &args, args.units);
}

/* A token belongs to one block, so the token copies of a block do not depend on the chunks: each is the first route of
 * a token to a rank, and these are counted like routes. */
sluice_status_t sluice_cuda_count_token_copies(sluice_stream_t stream, const sluice_device_blocks_t* b) {
  const int64_t routes = b->num_tokens * b->top_k;
  int32_t* table = NULL;
  if (b->num_ranks == 0) return SLUICE_OK;
  SLUICE_TRY(sluice_cuda_write_table(stream, b->rank_of_expert, b->num_experts, b->token_copy_scratch, &table));
  const scratch_t scratch = scratch_in(b->token_copy_scratch, b->num_experts, b->num_ranks, routes);
  const sluice_token_copy_args_t args = {
      .ids = b->ids,
      .slot_of = table,
      .rank = scratch.rank,
      .first = scratch.first,
      .units = sluice_ceil_div(routes, SLUICE_CUDA_WARP),
      .num_routes = routes,
      .top_k = b->top_k,
      .num_experts = b->num_experts,
      .num_ranks = b->num_ranks,
      .ids_t = b->ids_t,
      .ids_k = b->ids_k,
      .ids_64 = b->ids_64,
  };
  const sluice_block_args_t blocks = {
      .ids = scratch.first,
      .counts = b->token_copies,
      .units = b->num_blocks,
      .num_tokens = b->num_tokens,
      .top_k = b->top_k,
      .num_experts = b->num_ranks,
      .ids_t = b->top_k,
      .ids_k = 1,
  };
  sluice_cuda_launch(SLUICE_CUDA_token_copy_ranks, stream, &args, args.units);
  sluice_cuda_count_blocks(stream, &blocks);
  return SLUICE_OK;
}

static sluice_status_t number_inside(sluice_stream_t stream, const sluice_device_token_copies_t* p) {
  int32_t* table = NULL;
  SLUICE_TRY(sluice_cuda_write_table(stream, p->rank_of_expert, p->num_experts, p->scratch, &table));
  for (int32_t i = 0; i < p->num_chunks; ++i) number_chunk(stream, p, i, table);
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_number_token_copies(sluice_device_t* device, sluice_stream_t stream,
                                                const sluice_device_token_copies_t* token_copies) {
  SLUICE_TRY(sluice_cuda_enter(device));
  return sluice_cuda_leave_with(device, number_inside(stream, token_copies));
}

/* ---- arrivals ---- */

sluice_status_t sluice_cuda_move_words(sluice_device_t* device, sluice_stream_t stream, const sluice_row_run_t* runs,
                                       int64_t num_runs, const int32_t* src, int32_t* dst) {
  SLUICE_TRY(sluice_cuda_enter(device));
  device->kernels->move_rows(stream, sizeof *src, runs, num_runs, src, dst);
  return sluice_cuda_leave_with(device, SLUICE_OK);
}

static void place_inside(sluice_stream_t stream, const sluice_device_arrivals_t* a) {
  sluice_token_copy_place_args_t args = {.route_index = a->route_index,
                                         .token = a->token,
                                         .position = a->position,
                                         .weight = a->weight,
                                         .origin = a->origin,
                                         .top_k = a->top_k};
  for (int64_t i = 0; i < a->num_runs; ++i) {
    const sluice_device_token_copy_run_t* run = &a->runs[i];
    args.count += run->rows;
    args.runs[args.num_runs++] =
        (sluice_token_copy_run_t){(int32_t)args.count, run->route_index, run->token_copies, run->token_copy, run->row,
                                  run->origin,         run->from,        run->weight};
    if (args.num_runs < SLUICE_CUDA_TOKEN_COPY_RUNS && i < a->num_runs - 1) continue;
    args.units = sluice_ceil_div(args.count, SLUICE_CUDA_WARP);
    sluice_cuda_launch(SLUICE_CUDA_token_copy_place, stream, &args, args.units);
    args.count = args.num_runs = 0;
  }
}

sluice_status_t sluice_cuda_place_token_copies(sluice_device_t* device, sluice_stream_t stream,
                                               const sluice_device_arrivals_t* a) {
  uint64_t bytes = (uint64_t)a->token_copies * (uint64_t)a->top_k * sizeof(int32_t);
  SLUICE_TRY(sluice_cuda_fill(device, stream, a->position, 0xff, bytes));
  SLUICE_TRY(sluice_cuda_fill(device, stream, a->weight, 0xff, bytes));
  SLUICE_TRY(sluice_cuda_enter(device));
  place_inside(stream, a);
  return sluice_cuda_leave_with(device, SLUICE_OK);
}
