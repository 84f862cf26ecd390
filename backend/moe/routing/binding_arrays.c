// SPDX-License-Identifier: Apache-2.0
/* Allocates the arrays of a binding in its context's arena, and derives its offsets from its counts. */
#include "backend/moe/routing/binding_arrays.h"

#include <string.h>

#include "backend/base/math.h"
#include "backend/moe/routing/copies.h"

/* ---- arrays ---- */

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
  sluice_copies_take_counts(b);
  sluice_routes_take_orders(b, room, num_routes);
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

void sluice_binding_fill_counts(sluice_binding_t* b) {
  int32_t capacity = (int32_t)sluice_shape_capacity(&b->moe->shape);
  int64_t sent = (int64_t)b->num_chunks * b->moe->shape.config.num_experts;
  int64_t received = (int64_t)b->world_size * b->num_chunks * b->num_local;
  for (int64_t i = 0; i < sent; ++i) b->send_counts[i] = capacity;
  for (int64_t i = 0; i < received; ++i) b->recv_counts[i] = capacity;
  b->num_sent = sluice_binding_room(&b->moe->shape, b->num_chunks, b->num_tokens);
  for (int32_t i = 0; i < b->num_chunks; ++i) b->first_sent[i] = b->num_sent / b->num_chunks * i;
  b->first_sent[b->num_chunks] = b->num_sent; /* the same number for each chunk */
}

/* ---- offsets ---- */

static void finish_sent(sluice_binding_t* b, int32_t i) {
  const sluice_moe_t* moe = b->moe;
  int64_t* of_rank = b->sent_of_rank + (int64_t)i * (b->world_size + 1);
  int64_t row = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    of_rank[r] = row;
    for (int32_t p = moe->first_position[r]; p < moe->first_position[r + 1]; ++p) row += sluice_send_count(b, i, p);
  }
  of_rank[b->world_size] = row;
}

static void finish_received(sluice_binding_t* b, int32_t i) {
  int64_t* of_rank = b->recv_of_rank + (int64_t)i * (b->world_size + 1);
  int64_t* rows = b->rows_of_expert + (int64_t)i * b->num_local;
  int64_t remote = 0;
  for (int32_t e = 0; e < b->num_local; ++e) rows[e] = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    of_rank[r] = remote;
    for (int32_t e = 0; e < b->num_local; ++e) {
      int64_t count = sluice_recv_count(b, r, i, e);
      rows[e] += count;
      if (r != b->moe->context->rank) remote += count;
    }
  }
  of_rank[b->world_size] = remote;
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    b->first_in_chunk[(int64_t)i * b->num_local + e] = row;
    row += rows[e];
  }
  b->first_of_chunk[i + 1] = b->first_of_chunk[i] + row;
}

sluice_status_t sluice_binding_finish(sluice_binding_t* b) {
  int32_t self = b->moe->context->rank;
  b->first_of_chunk[0] = b->first_returned[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    finish_sent(b, i);
    finish_received(b, i);
    const int64_t* sent = b->sent_of_rank + (int64_t)i * (b->world_size + 1);
    int64_t remote_sent = sent[b->world_size] - (sent[self + 1] - sent[self]);
    int64_t remote_received = b->recv_of_rank[(int64_t)i * (b->world_size + 1) + b->world_size];
    const int64_t returned = b->chunks_by_experts ? sluice_max(remote_received, sent[b->world_size]) : 0;
    b->first_returned[i + 1] = b->first_returned[i] + returned;
    b->max_chunk_remote = sluice_max(b->max_chunk_remote, sluice_max(remote_sent, remote_received));
    b->max_chunk_sent = sluice_max(b->max_chunk_sent, sent[b->world_size]);
    b->max_chunk_rows = sluice_max(b->max_chunk_rows, b->first_of_chunk[i + 1] - b->first_of_chunk[i]);
  }
  b->num_rows = b->first_of_chunk[b->num_chunks];
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    for (int32_t i = 0; i < b->num_chunks; ++i) {
      b->first_in_pass[(int64_t)i * b->num_local + e] = row;
      row += b->rows_of_expert[(int64_t)i * b->num_local + e];
    }
  }
  sluice_routes_finish(b);
  /* Positions number the returned rows with 32 bits. */
  if (sluice_max(b->num_rows, b->first_returned[b->num_chunks]) > INT32_MAX) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: this rank would receive %lld rows; at most 2^31 are possible",
                       b->moe->shape.config.layer_id, (long long)b->num_rows);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_binding_of_rows(sluice_moe_t* moe, const int64_t* rows_per_expert, sluice_binding_t* b) {
  sluice_binding_init(b, moe, 1, 0);
  SLUICE_TRY(
      sluice_arena_reset(&b->memory->binding, sluice_binding_bytes_of(&moe->shape, 1, 0, 0, 0), "offsets of a pass"));
  sluice_binding_take_offsets(b, 0);
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    if (rows_per_expert[e] < 0 || rows_per_expert[e] > INT32_MAX - row) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                         "layer %d: rows_per_expert[%d] is %lld; counts are not negative and sum to less "
                         "than 2^31",
                         moe->shape.config.layer_id, e, (long long)rows_per_expert[e]);
    }
    b->rows_of_expert[e] = rows_per_expert[e];
    b->first_in_chunk[e] = b->first_in_pass[e] = row;
    row += rows_per_expert[e];
  }
  b->first_of_chunk[0] = b->first_returned[0] = b->first_returned[1] = 0;
  b->first_of_chunk[1] = b->num_rows = b->max_chunk_rows = row;
  return SLUICE_OK;
}
