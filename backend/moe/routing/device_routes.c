// SPDX-License-Identifier: Apache-2.0
/* Routes in a device's memory: its kernels order them, and they stay there. */
#include <string.h>

#include "backend/base/tensor.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/chunks_by_tokens.h"
#include "backend/moe/routing/routes.h"

static void place(sluice_binding_t* b, void* routes) {
  const sluice_shape_t shape = sluice_binding_shape(b);
  uint64_t bytes = sluice_device_order_bytes(&shape, b->num_tokens);
  b->order = routes;
  b->order_token = (int32_t*)(void*)((char*)routes + bytes);
  b->position = (int32_t*)(void*)((char*)routes + 2 * bytes);
  if (sluice_shape_has_device_token_copies(&shape)) {
    char* at = (char*)b->position + sluice_align_up((uint64_t)(b->num_tokens * b->top_k) * sizeof(int32_t));
    b->token_copies.token = (int32_t*)(void*)at;
    b->token_copies.position_of_token =
        (int32_t*)(void*)(at + sluice_device_token_copy_tokens_bytes(&shape, b->num_tokens));
  }
  int64_t of_chunk = sluice_shape_capacity(&shape) * shape.config.num_experts;
  for (int32_t i = 0; i <= b->num_chunks; ++i) {
    b->first_order[i] = of_chunk > 0 ? i * of_chunk : b->first_token[i] * b->top_k;
  }
}

/* first_bad: index found by the device; INT32_MAX: all ids name an expert, or are -1. */
static sluice_status_t check_first_bad(const sluice_moe_t* moe, int32_t first_bad) {
  if (first_bad == INT32_MAX) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "layer %d: expert_ids[%d, %d] is out of range; ids lie in [0, %d), or -1 to drop the route",
                     moe->shape.config.layer_id, first_bad / moe->shape.config.top_k,
                     first_bad % moe->shape.config.top_k, moe->shape.config.num_experts);
}

/* Computes first_sent and num_sent from send_counts. */
static void sum_sent(sluice_binding_t* b) {
  int32_t num_experts = b->moe->shape.config.num_experts;
  b->first_sent[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    b->first_sent[i + 1] = b->first_sent[i];
    for (int32_t place = 0; place < num_experts; ++place) b->first_sent[i + 1] += sluice_send_count(b, i, place);
  }
  b->num_sent = b->first_sent[b->num_chunks];
}

/* counts: [n][E + 1], as the device wrote them. */
static sluice_status_t take_counts(sluice_binding_t* b, const int32_t* counts) {
  const sluice_shape_t shape = sluice_binding_shape(b);
  int32_t num_experts = b->moe->shape.config.num_experts;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int32_t* of_chunk = counts + (int64_t)i * (num_experts + 1);
    SLUICE_TRY(check_first_bad(b->moe, of_chunk[num_experts]));
    memcpy(b->send_counts + (int64_t)i * num_experts, of_chunk, (size_t)num_experts * sizeof *of_chunk);
  }
  sum_sent(b);
  if (!sluice_shape_has_device_token_copies(&shape)) return SLUICE_OK;
  const int32_t* token_copies = counts + (int64_t)b->num_chunks * (num_experts + 1);
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    memcpy(b->token_copies.send_counts + (int64_t)i * b->world_size, token_copies + (int64_t)i * (b->world_size + 1),
           (size_t)b->world_size * sizeof *token_copies);
  }
  return SLUICE_OK;
}

/* Size of a host table of ranks by expert. */
static uint64_t ranks_bytes_of(const sluice_shape_t* shape) {
  return sluice_shape_has_device_token_copies(shape) ? (uint64_t)shape->config.num_experts * sizeof(int32_t) : 0;
}
static void fill_ranks(const sluice_moe_t* moe, const sluice_shape_t* shape, int32_t* ranks) {
  for (int32_t e = 0; e < shape->config.num_experts && sluice_shape_has_device_token_copies(shape); ++e) {
    ranks[e] = 0;
    while (moe->expert_position[e] >= moe->first_position[ranks[e] + 1]) ++ranks[e];
  }
}

/* Numbers the token copies of routes that `routes` has ordered. ranks: host [E]. */
static sluice_status_t number_there(sluice_moe_t* moe, sluice_stream_t stream, const sluice_device_routes_t* routes,
                                    const int32_t* ranks, sluice_binding_t* b) {
  sluice_context_t* context = moe->context;
  const sluice_shape_t shape = sluice_binding_shape(b);
  const sluice_device_scratch_t scratch = sluice_rows_routing_scratch(context->rows, context->device);
  b->token_copies.sent_route_index =
      sluice_arena_take(&b->memory->routes, sluice_device_route_index_bytes(&shape, b->num_tokens));
  const sluice_device_token_copies_t token_copies = {
      .ids = routes->ids,
      .ids_t = routes->ids_t,
      .ids_k = routes->ids_k,
      .ids_64 = routes->ids_64,
      .num_chunks = b->num_chunks,
      .first_token = b->first_token,
      .rank_of_expert = ranks,
      .top_k = b->top_k,
      .num_experts = moe->shape.config.num_experts,
      .num_ranks = b->world_size,
      .most = (int32_t)sluice_most_token_copies_of_token(&moe->shape),
      .position = b->position,
      .counts = routes->counts + (int64_t)b->num_chunks * (moe->shape.config.num_experts + 1),
      .token = b->token_copies.token,
      .position_of_token = b->token_copies.position_of_token,
      .route_index = b->token_copies.sent_route_index,
      .scratch = sluice_arena_take(&b->memory->routes,
                                   sluice_device_token_copy_scratch_bytes(&shape, &scratch, b->num_tokens)),
  };
  return context->device->memory->routing->number_token_copies(context->device, stream, &token_copies);
}

/* Orders the routes on the device, and their token copies. ranks: host [E] for token copies, else NULL. out_counts: on
 * the device, device_counts_bytes(). */
static sluice_status_t route_there(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                   int64_t* drop_counters, const int32_t* ranks, sluice_binding_t* b,
                                   int32_t** out_counts) {
  sluice_context_t* context = moe->context;
  const sluice_routing_kernels_t* kernels = context->device->memory->routing;
  const sluice_device_scratch_t scratch = sluice_rows_routing_scratch(context->rows, context->device);
  const sluice_shape_t shape = sluice_binding_shape(b);
  int32_t num_experts = shape.config.num_experts;
  uint64_t counts_bytes = sluice_device_counts_bytes(&shape, b->num_chunks);
  uint64_t scratch_bytes = kernels->route_scratch_bytes(b->num_tokens * b->top_k, num_experts);
  uint64_t routes_bytes = sluice_binding_routes_bytes(&shape, b->num_tokens);
  uint64_t token_copies_bytes = sluice_device_route_index_bytes(&shape, b->num_tokens) +
                                sluice_device_token_copy_scratch_bytes(&shape, &scratch, b->num_tokens);
  SLUICE_TRY(sluice_arena_reset(&b->memory->routes,
                                routes_bytes + sluice_align_up(counts_bytes) + scratch_bytes + token_copies_bytes,
                                "routes on the device"));
  place(b, sluice_arena_take(&b->memory->routes, routes_bytes));
  sluice_device_routes_t routes = {
      .ids = sluice_tensor_data(expert_ids),
      .ids_t = sluice_tensor_stride(expert_ids, 0),
      .ids_k = sluice_tensor_stride(expert_ids, 1),
      .ids_64 = sluice_tensor_dtype(expert_ids) == SLUICE_DTYPE_I64,
      .num_chunks = b->num_chunks,
      .first_token = b->first_token,
      .expert_position = moe->expert_position,
      .top_k = b->top_k,
      .num_experts = num_experts,
      .counts = sluice_arena_take(&b->memory->routes, counts_bytes),
      .order = b->order,
      .order_token = b->order_token,
      .position = b->position,
      .capacity = sluice_shape_capacity(&shape),
      .drop_counters = drop_counters,
  };
  routes.scratch = sluice_arena_take(&b->memory->routes, scratch_bytes);
  *out_counts = routes.counts;
  SLUICE_TRY(kernels->route(context->device, stream, &routes));
  return sluice_shape_has_device_token_copies(&shape) ? number_there(moe, stream, &routes, ranks, b) : SLUICE_OK;
}

static sluice_status_t order(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                             int32_t num_chunks, sluice_binding_t* b) {
  sluice_context_t* context = moe->context;
  int64_t* cursor = NULL;
  int32_t* there = NULL;
  SLUICE_TRY(sluice_binding_take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  const sluice_shape_t shape = sluice_binding_shape(b);
  const uint64_t bytes = sluice_device_counts_bytes(&shape, num_chunks), ranks_bytes = ranks_bytes_of(&shape);
  SLUICE_TRY(sluice_arena_reset(&b->memory->scratch, sluice_align_up(bytes) + ranks_bytes, "counts of a pass"));
  int32_t* counts = sluice_arena_take(&b->memory->scratch, bytes);
  int32_t* ranks = sluice_arena_take(&b->memory->scratch, ranks_bytes);
  fill_ranks(moe, &shape, ranks);
  SLUICE_TRY(route_there(moe, stream, expert_ids, NULL, ranks, b, &there));
  SLUICE_TRY(context->rows->read(context, stream, there, counts, bytes));
  SLUICE_TRY(take_counts(b, counts));
  sluice_binding_receive_own(b);
  return SLUICE_OK;
}

/* ---- in two parts, under a plan ---- */

/* On the host the table of ranks follows the counts. */
static int32_t* ranks_behind(const sluice_moe_t* moe, const int32_t* counts) {
  return (int32_t*)(void*)((char*)(uintptr_t)counts +
                           sluice_align_up(sluice_device_block_counts_bytes(&moe->shape, SLUICE_PLAN_BLOCKS)));
}

static sluice_status_t look(sluice_moe_t* moe, sluice_pass_memory_t* memory, sluice_stream_t stream,
                            const sluice_tensor_t* expert_ids, int32_t** out_counts) {
  sluice_context_t* context = moe->context;
  const sluice_routing_kernels_t* kernels = context->device->memory->routing;
  const sluice_device_scratch_t device_scratch = sluice_rows_routing_scratch(context->rows, context->device);
  int32_t num_experts = moe->shape.config.num_experts, num_blocks = SLUICE_PLAN_BLOCKS;
  uint64_t bytes = sluice_device_block_counts_bytes(&moe->shape, num_blocks),
           scratch = kernels->route_scratch_bytes(0, num_experts);
  uint64_t token_copy_scratch =
      sluice_device_token_copy_scratch_bytes(&moe->shape, &device_scratch, expert_ids->shape[0]);
  SLUICE_TRY(sluice_binding_check_routes(moe, expert_ids->shape[0]));
  SLUICE_TRY(
      sluice_arena_reset(&memory->scratch, sluice_align_up(bytes) + ranks_bytes_of(&moe->shape), "counts of a pass"));
  SLUICE_TRY(sluice_arena_reset(&memory->routes, sluice_align_up(bytes) + sluice_align_up(scratch) + token_copy_scratch,
                                "routes on the device"));
  int32_t* there = sluice_arena_take(&memory->routes, bytes);
  int32_t* counts = sluice_arena_take(&memory->scratch, bytes);
  fill_ranks(moe, &moe->shape, ranks_behind(moe, counts));
  const sluice_device_blocks_t blocks = {
      .ids = sluice_tensor_data(expert_ids),
      .ids_t = sluice_tensor_stride(expert_ids, 0),
      .ids_k = sluice_tensor_stride(expert_ids, 1),
      .ids_64 = sluice_tensor_dtype(expert_ids) == SLUICE_DTYPE_I64,
      .num_blocks = num_blocks,
      .num_tokens = expert_ids->shape[0],
      .expert_position = moe->expert_position,
      .top_k = moe->shape.config.top_k,
      .num_experts = num_experts,
      .counts = there,
      .scratch = sluice_arena_take(&memory->routes, scratch),
      .num_ranks = sluice_shape_has_device_token_copies(&moe->shape) ? context->world_size : 0,
      .rank_of_expert = ranks_behind(moe, counts),
      .token_copies = there + sluice_device_block_routes(&moe->shape, num_blocks),
      .token_copy_scratch = sluice_arena_take(&memory->routes, token_copy_scratch),
  };
  SLUICE_TRY(kernels->count_blocks(context->device, stream, &blocks));
  SLUICE_TRY(context->rows->read(context, stream, there, counts, bytes));
  for (int32_t g = 0; g < num_blocks; ++g) {
    const int32_t* of_block = counts + (int64_t)g * (num_experts + 1);
    SLUICE_TRY(check_first_bad(moe, of_block[num_experts]));
    memmove(counts + (int64_t)g * num_experts, of_block, (size_t)num_experts * sizeof *counts);
  }
  *out_counts = counts;
  return SLUICE_OK;
}

/* Sums over the blocks of each chunk. of_block: [G][stride], of which `count` entries are used; out: [n][count]. */
static void sum_blocks(int32_t num_chunks, const int32_t* first_block, const int32_t* of_block, int32_t stride,
                       int32_t count, int32_t* out) {
  memset(out, 0, (size_t)num_chunks * (size_t)count * sizeof *out);
  for (int32_t i = 0; i < num_chunks; ++i) {
    int32_t* of_chunk = out + (int64_t)i * count;
    for (int32_t g = first_block[i]; g < first_block[i + 1]; ++g) {
      for (int32_t k = 0; k < count; ++k) of_chunk[k] += of_block[(int64_t)g * stride + k];
    }
  }
}

static sluice_status_t order_blocks(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                    const sluice_block_chunks_t* chunks, const int32_t* counts, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  int32_t* there = NULL;
  int32_t num_experts = moe->shape.config.num_experts;
  SLUICE_TRY(
      sluice_binding_take_arrays(moe, expert_ids->shape[0], chunks->num_chunks, chunks->first_token, b, &cursor));
  SLUICE_TRY(route_there(moe, stream, expert_ids, NULL, ranks_behind(moe, counts), b, &there));
  sum_blocks(chunks->num_chunks, chunks->first_block, counts, num_experts, num_experts, b->send_counts);
  if (sluice_shape_has_device_token_copies(&moe->shape)) {
    sum_blocks(chunks->num_chunks, chunks->first_block,
               counts + sluice_device_block_routes(&moe->shape, SLUICE_PLAN_BLOCKS), b->world_size + 1, b->world_size,
               b->token_copies.send_counts);
  }
  sum_sent(b);
  sluice_binding_receive_own(b);
  return SLUICE_OK;
}

static sluice_status_t order_capacity(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                      int32_t num_chunks, int64_t* drop_counters, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  int32_t* there = NULL;
  SLUICE_TRY(sluice_binding_take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  SLUICE_TRY(route_there(moe, stream, expert_ids, drop_counters, NULL, b, &there));
  sluice_binding_fill_counts(b);
  return SLUICE_OK;
}

/* ---- the rest of the table ---- */

static sluice_status_t sum(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids, const int32_t* counts,
                           int32_t num_blocks, int64_t* out_table) {
  (void)expert_ids;
  sluice_chunks_by_tokens_add(moe, counts, num_blocks, out_table);
  return SLUICE_OK;
}

static void take_offsets(sluice_binding_t* b, int64_t num_sent) {
  (void)num_sent;
  b->first_order = sluice_arena_take(&b->memory->binding, ((uint64_t)b->num_chunks + 1) * 8);
}

static uint64_t kept_bytes(const sluice_binding_t* b) {
  const sluice_shape_t shape = sluice_binding_shape(b);
  return sluice_binding_routes_bytes(&shape, b->num_tokens);
}

static sluice_status_t keep(const sluice_binding_t* b, sluice_stream_t stream, void* kept) {
  sluice_context_t* context = b->moe->context;
  return context->rows->copy(context, stream, kept, b->order, kept_bytes(b));
}

const sluice_routes_t sluice_routes_in_device_memory = {.order = order,
                                                        .look = look,
                                                        .sum = sum,
                                                        .order_blocks = order_blocks,
                                                        .order_capacity = order_capacity,
                                                        .take_offsets = take_offsets,
                                                        .kept_bytes = kept_bytes,
                                                        .keep = keep,
                                                        .place = place};
