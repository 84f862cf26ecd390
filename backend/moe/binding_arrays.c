/* Where the arrays of a binding lie, in the arena of its context. */
#include "backend/moe/binding_arrays.h"

#include <string.h>

uint64_t sluice_binding_bytes_of(const sluice_binding_t* b, int64_t num_sent, int64_t num_routes, int with_orders) {
  uint64_t n = (uint64_t)b->num_chunks, w = (uint64_t)b->world_size, l = (uint64_t)b->num_local;
  uint64_t experts = (uint64_t)b->moe->config.num_experts;
  uint64_t bytes =
      4 * sluice_align_up((n + 1) * 8) + 2 * sluice_align_up(n * (w + 1) * 8) + 3 * sluice_align_up(n * l * 8);
  if (sluice_is_far(b->moe)) {
    bytes += sluice_align_up((n + 1) * 8); /* first_order */
    num_sent = num_routes = 0;
  }
  bytes += sluice_align_up((uint64_t)num_sent * 4); /* order_token */
  if (with_orders) {
    uint64_t parcels = sluice_has_far_parcels(b->moe) ? w : 0; /* numbers of them for a chunk */
    if (parcels > 0) bytes += 2 * sluice_align_up(n * w * 4) + sluice_align_up(w * n * (l + 1) * 4);
    bytes += sluice_align_up(n * experts * 4) + sluice_align_up(n * (experts + parcels) * 4) +
             sluice_align_up(w * n * l * 4) + sluice_align_up((uint64_t)num_sent * 4) +
             sluice_align_up((uint64_t)num_routes * 4);
  }
  return bytes;
}

void sluice_binding_take_offsets(sluice_binding_t* b, int64_t num_sent) {
  sluice_arena_t* arena = &b->moe->context->binding;
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
  if (sluice_is_far(b->moe)) {
    b->first_order = sluice_arena_take(arena, (n + 1) * 8);
  } else {
    b->first_order = b->first_sent;
    b->order_token = sluice_arena_take(arena, (uint64_t)num_sent * 4);
  }
}

int64_t sluice_binding_room(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  int64_t ceiling = sluice_layer_ceiling(moe);
  return ceiling > 0 ? num_chunks * ceiling * moe->config.num_experts : num_tokens * moe->config.top_k;
}

void sluice_binding_init(sluice_binding_t* b, const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  memset(b, 0, sizeof *b);
  b->moe = moe;
  b->num_chunks = num_chunks;
  b->world_size = moe->context->world_size;
  b->num_local = moe->num_local;
  b->top_k = moe->config.top_k;
  b->num_tokens = num_tokens;
}

static void cut_tokens(sluice_binding_t* b) {
  for (int32_t i = 0; i <= b->num_chunks; ++i) b->first_token[i] = b->num_tokens * i / b->num_chunks;
}

uint64_t sluice_binding_arena_bytes(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  sluice_binding_t b;
  sluice_binding_init(&b, moe, num_chunks, num_tokens);
  return sluice_binding_bytes_of(&b, sluice_binding_room(moe, num_chunks, num_tokens), num_tokens * moe->config.top_k,
                                 1) +
         sluice_align_up((uint64_t)moe->config.num_experts * 8);
}

sluice_status_t sluice_binding_check_routes(const sluice_moe_t* moe, int64_t num_tokens) {
  int64_t num_routes = num_tokens * moe->config.top_k;
  if (num_routes <= INT32_MAX) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: %lld tokens with %d routes each are more than 2^31 routes",
                     moe->config.layer_id, (long long)num_tokens, moe->config.top_k);
}

sluice_status_t sluice_binding_take_arrays(sluice_moe_t* moe, int64_t num_tokens, int32_t num_chunks,
                                           const int64_t* first_token, sluice_binding_t* b, int64_t** out_cursor) {
  int64_t num_routes = num_tokens * moe->config.top_k;
  sluice_binding_init(b, moe, num_chunks, num_tokens);
  SLUICE_TRY(sluice_binding_check_routes(moe, num_tokens));
  uint64_t num_experts = (uint64_t)moe->config.num_experts;
  uint64_t bytes = sluice_binding_arena_bytes(moe, num_chunks, num_tokens);
  SLUICE_TRY(sluice_arena_reset(&moe->context->binding, bytes, "routes and offsets of a pass"));
  sluice_arena_t* arena = &moe->context->binding;
  int64_t room = sluice_binding_room(moe, num_chunks, num_tokens);
  sluice_binding_take_offsets(b, room);
  b->send_counts = sluice_arena_take(arena, (uint64_t)num_chunks * num_experts * 4);
  b->recv_counts =
      sluice_arena_take(arena, (uint64_t)b->world_size * (uint64_t)num_chunks * (uint64_t)b->num_local * 4);
  uint64_t parcels = sluice_has_far_parcels(moe) ? (uint64_t)b->world_size : 0;
  b->counts_out = sluice_arena_take(arena, (uint64_t)num_chunks * (num_experts + parcels) * 4);
  b->counts_in = b->recv_counts;
  if (parcels > 0) {
    b->parcels.send_counts = sluice_arena_take(arena, (uint64_t)num_chunks * parcels * 4);
    b->parcels.recv_counts = sluice_arena_take(arena, (uint64_t)num_chunks * parcels * 4);
    b->counts_in = sluice_arena_take(arena, (uint64_t)num_chunks * parcels * ((uint64_t)b->num_local + 1) * 4);
  }
  if (!sluice_is_far(moe)) {
    b->order = sluice_arena_take(arena, (uint64_t)room * 4);
    b->position = sluice_arena_take(arena, (uint64_t)num_routes * 4);
  }
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
  const int32_t own = moe->first_place[moe->context->rank];
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    memcpy(b->recv_counts + ((int64_t)moe->context->rank * b->num_chunks + i) * b->num_local,
           b->send_counts + (int64_t)i * (int64_t)moe->config.num_experts + own,
           (size_t)b->num_local * sizeof(int32_t));
  }
}
