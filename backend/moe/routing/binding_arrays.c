// SPDX-License-Identifier: Apache-2.0
/* Allocates the arrays of a binding in its context's arena. */
#include "backend/moe/routing/binding_arrays.h"

#include <string.h>

#include "backend/moe/routing/copies.h"

void sluice_binding_take_offsets(sluice_binding_t* b, int64_t num_sent) {
  sluice_arena_t* arena = &b->memory->binding;
  uint64_t n = (uint64_t)b->num_chunks, w = (uint64_t)b->world_size, l = (uint64_t)b->num_local;
  b->first_token = sluice_arena_take(arena, (n + 1) * 8);
  b->first_sent = sluice_arena_take(arena, (n + 1) * 8);
  b->first_of_chunk = sluice_arena_take(arena, (n + 1) * 8);
  b->first_returned = sluice_arena_take(arena, (n + 1) * 8);
  b->sent_of_rank = sluice_arena_take(arena, n * (w + 1) * 8);
  b->recv_of_rank = sluice_arena_take(arena, n * (w + 1) * 8);
  b->rows_of_expert = sluice_arena_take(arena, n * l * 8);
  b->first_in_chunk = sluice_arena_take(arena, n * l * 8);
  b->first_in_pass = sluice_arena_take(arena, n * l * 8);
  b->routes->take_offsets(b, num_sent);
}

void sluice_binding_init(sluice_binding_t* b, const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  sluice_pass_memory_t* const memory = b->memory;
  const int32_t deduplicate = b->deduplicate;
  memset(b, 0, sizeof *b);
  b->memory = memory;
  b->moe = moe;
  b->routes = moe->strategies->routes;
  sluice_binding_take_deduplication(b, moe, deduplicate);
  b->num_chunks = num_chunks;
  b->world_size = moe->context->world_size;
  b->num_local = moe->shape.num_local;
  b->top_k = moe->shape.config.top_k;
  b->num_tokens = num_tokens;
}

const sluice_strategies_t* sluice_strategies_of(const sluice_moe_t* moe, int32_t deduplicate) {
  const sluice_strategies_t* one = moe->strategies;
  return one->by_deduplication == NULL ? one : &one->by_deduplication[deduplicate];
}

void sluice_binding_take_deduplication(sluice_binding_t* b, const sluice_moe_t* moe, int32_t deduplicate) {
  const int is_open = sluice_shape_travel_is_open(&moe->shape);
  b->deduplicate = (uint8_t)(is_open ? deduplicate : sluice_shape_deduplication(&moe->shape));
  b->two_levels = b->deduplicate == SLUICE_DEDUPLICATE_NODES;
  b->copies = sluice_strategies_of(moe, b->deduplicate)->copies;
}

static void cut_tokens(sluice_binding_t* b) {
  for (int32_t i = 0; i <= b->num_chunks; ++i) b->first_token[i] = b->num_tokens * i / b->num_chunks;
}

sluice_status_t sluice_binding_check_routes(const sluice_moe_t* moe, int64_t num_tokens) {
  int64_t num_routes = num_tokens * moe->shape.config.top_k;
  if (num_routes <= INT32_MAX) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: %lld tokens with %d routes each are more than 2^31 routes",
                     moe->shape.config.layer_id, (long long)num_tokens, moe->shape.config.top_k);
}

sluice_status_t sluice_binding_take_arrays(sluice_moe_t* moe, int64_t num_tokens, int32_t num_chunks,
                                           const int64_t* first_token, sluice_binding_t* b, int64_t** out_cursor) {
  int64_t num_routes = num_tokens * moe->shape.config.top_k;
  sluice_binding_init(b, moe, num_chunks, num_tokens);
  SLUICE_TRY(sluice_binding_check_routes(moe, num_tokens));
  uint64_t num_experts = (uint64_t)moe->shape.config.num_experts;
  const sluice_shape_t shape = sluice_binding_shape(b);
  uint64_t bytes = sluice_binding_arena_bytes(&shape, num_chunks, num_tokens);
  SLUICE_TRY(sluice_arena_reset(&b->memory->binding, bytes, "routes and offsets of a pass"));
  sluice_arena_t* arena = &b->memory->binding;
  int64_t room = sluice_binding_room(&moe->shape, num_chunks, num_tokens);
  sluice_binding_take_offsets(b, room);
  b->send_counts = sluice_arena_take(arena, (uint64_t)num_chunks * num_experts * 4);
  b->recv_counts =
      sluice_arena_take(arena, (uint64_t)b->world_size * (uint64_t)num_chunks * (uint64_t)b->num_local * 4);
  uint64_t words = (uint64_t)b->copies->header_words * (uint64_t)b->world_size;
  b->counts_out = sluice_arena_take(arena, (uint64_t)num_chunks * (num_experts + words) * 4);
  b->copies->take_counts(b);
  b->routes->take_orders(b, room, num_routes);
  *out_cursor = sluice_arena_take(arena, num_experts * 8);
  if (first_token == NULL) {
    cut_tokens(b);
  } else {
    memcpy(b->first_token, first_token, (size_t)(num_chunks + 1) * sizeof *first_token);
  }
  return SLUICE_OK;
}

void sluice_binding_receive_own(sluice_binding_t* b) {
  const sluice_moe_t* moe = b->moe;
  const int32_t own = moe->first_position[moe->context->rank];
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    memcpy(b->recv_counts + ((int64_t)moe->context->rank * b->num_chunks + i) * b->num_local,
           b->send_counts + (int64_t)i * (int64_t)moe->shape.config.num_experts + own,
           (size_t)b->num_local * sizeof(int32_t));
  }
}
