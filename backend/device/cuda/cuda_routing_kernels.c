// SPDX-License-Identifier: Apache-2.0
/* The kernels of cuda_routing.h, implementing device/routing_kernels.h. */
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/cuda_routing.h"
#include "backend/device/cuda/cuda_state.h"

/* The scratch consists of the table of slots, padded to whole words; the offsets of one chunk; its tiles. */
static uint64_t offsets_bytes(int32_t num_experts) {
  return sluice_align_up(((uint64_t)num_experts + 1) * sizeof(int32_t));
}

static uint64_t route_scratch_bytes(int64_t num_routes, int32_t num_experts) {
  return sluice_cuda_table_bytes(num_experts) + offsets_bytes(num_experts) +
         sluice_align_up(sluice_cuda_route_scratch_bytes(num_routes, num_experts));
}

static sluice_status_t route_inside(sluice_device_t* device, sluice_stream_t stream, const sluice_device_routes_t* r) {
  char* scratch = r->scratch;
  int32_t* table = NULL;
  SLUICE_TRY(sluice_cuda_write_table(stream, r->expert_position, r->num_experts, scratch, &table));
  if (r->capacity > 0) {
    uint64_t bytes = (uint64_t)r->num_chunks * (uint64_t)r->num_experts * (uint64_t)r->capacity * sizeof(int32_t);
    SLUICE_TRY(sluice_cuda_fill(device, stream, r->order, 0xff, bytes));
    SLUICE_TRY(sluice_cuda_fill(device, stream, r->order_token, 0xff, bytes));
  }
  for (int32_t i = 0; i < r->num_chunks; ++i) {
    int64_t first = r->first_token[i], tokens = r->first_token[i + 1] - first;
    int64_t at = r->capacity > 0 ? (int64_t)i * r->num_experts * r->capacity : first * r->top_k;
    int32_t* counts = r->counts + (int64_t)i * (r->num_experts + 1);
    const sluice_route_args_t args = {
        .ids = (const char*)r->ids + first * r->ids_t * (r->ids_64 ? 8 : 4),
        .slot_of = table,
        .tile_counts =
            (int32_t*)(void*)(scratch + sluice_cuda_table_bytes(r->num_experts) + offsets_bytes(r->num_experts)),
        .counts = counts,
        .offsets = (int32_t*)(void*)(scratch + sluice_cuda_table_bytes(r->num_experts)),
        .token_of = r->order_token + at,
        .route_of = r->order + at,
        .first_bad = counts + r->num_experts,
        .position = r->position + first * r->top_k,
        .num_routes = tokens * r->top_k,
        .top_k = r->top_k,
        .num_experts = r->num_experts,
        .ids_t = r->ids_t,
        .ids_k = r->ids_k,
        .ids_64 = r->ids_64,
        .first_token = first,
        .capacity = r->capacity,
        .drop_counters = r->drop_counters,
        .begins = i == 0,
    };
    sluice_cuda_route(stream, &args);
  }
  return SLUICE_OK;
}

static sluice_status_t route(sluice_device_t* device, sluice_stream_t stream, const sluice_device_routes_t* routes) {
  SLUICE_TRY(sluice_cuda_enter(device));
  return sluice_cuda_leave_with(device, route_inside(device, stream, routes));
}

static sluice_status_t count_inside(sluice_stream_t stream, const sluice_device_blocks_t* b) {
  int32_t* table = NULL;
  SLUICE_TRY(sluice_cuda_write_table(stream, b->expert_position, b->num_experts, b->scratch, &table));
  sluice_cuda_count_blocks(stream, &(sluice_block_args_t){.ids = b->ids,
                                                          .slot_of = table,
                                                          .counts = b->counts,
                                                          .units = b->num_blocks,
                                                          .num_tokens = b->num_tokens,
                                                          .top_k = b->top_k,
                                                          .num_experts = b->num_experts,
                                                          .ids_t = b->ids_t,
                                                          .ids_k = b->ids_k,
                                                          .ids_64 = b->ids_64});
  return sluice_cuda_count_token_copies(stream, b);
}

static sluice_status_t count_blocks(sluice_device_t* device, sluice_stream_t stream,
                                    const sluice_device_blocks_t* blocks) {
  SLUICE_TRY(sluice_cuda_enter(device));
  return sluice_cuda_leave_with(device, count_inside(stream, blocks));
}

const sluice_routing_kernels_t sluice_cuda_routing_kernels = {
    .route_scratch_bytes = route_scratch_bytes,
    .route = route,
    .count_blocks = count_blocks,
    .token_copy_scratch_bytes = sluice_cuda_token_copy_scratch_bytes,
    .number_token_copies = sluice_cuda_number_token_copies,
    .move_words = sluice_cuda_move_words,
    .place_token_copies = sluice_cuda_place_token_copies,
};
