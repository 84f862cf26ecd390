// SPDX-License-Identifier: Apache-2.0
/* Routes in host memory: the calling thread orders them, and META holds them between calls. */
#include <string.h>

#include "backend/moe/routing/capacity_routes.h"
#include "backend/moe/routing/chunks_by_tokens.h"
#include "backend/moe/routing/chunks_by_experts.h"
#include "backend/moe/routing/host_routes.h"
#include "backend/moe/routing/route_ids.h"
#include "backend/moe/routing/routes.h"

static sluice_status_t order(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                             int32_t num_chunks, sluice_binding_t* b) {
  (void)stream;
  sluice_shape_t shape = moe->shape;
  sluice_shape_take_deduplication(&shape, b->deduplicate);
  return sluice_shape_chunks_by_experts(&shape, num_chunks)
             ? sluice_binding_route_rows(moe, expert_ids, num_chunks, b)
             : sluice_binding_route(moe, expert_ids, num_chunks, NULL, b);
}

static sluice_status_t check(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids) {
  sluice_id_reader_t reader = sluice_id_reader(expert_ids);
  for (int64_t t = 0; t < expert_ids->shape[0]; ++t) {
    for (int32_t k = 0; k < moe->shape.config.top_k; ++k) {
      int32_t place = 0;
      SLUICE_TRY(sluice_place_of_route(moe, &reader, t, k, &place));
    }
  }
  return SLUICE_OK;
}

static sluice_status_t look(sluice_moe_t* moe, sluice_pass_memory_t* memory, sluice_stream_t stream,
                            const sluice_tensor_t* expert_ids, int32_t** out_counts) {
  (void)memory, (void)stream;
  *out_counts = NULL;
  return check(moe, expert_ids);
}

static sluice_status_t sum(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids, const int32_t* counts,
                           int32_t num_blocks, int64_t* out_table) {
  (void)counts;
  return sluice_chunks_by_tokens_count(moe, expert_ids, num_blocks, out_table);
}

static sluice_status_t order_blocks(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                    const sluice_block_chunks_t* chunks, const int32_t* counts, sluice_binding_t* b) {
  (void)stream, (void)counts;
  return sluice_binding_route(moe, expert_ids, chunks->num_chunks, chunks->first_token, b);
}

static sluice_status_t order_capacity(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                      int32_t num_chunks, int64_t* drop_counters, sluice_binding_t* b) {
  (void)stream;
  return sluice_binding_route_under_capacity(moe, expert_ids, num_chunks, drop_counters, b);
}

static void take_offsets(sluice_binding_t* b, int64_t num_sent) {
  b->first_order = b->first_sent;
  b->order_token = sluice_arena_take(&b->memory->binding, (uint64_t)num_sent * 4);
}

static void take_orders(sluice_binding_t* b, int64_t room, int64_t num_routes) {
  b->order = sluice_arena_take(&b->memory->binding, (uint64_t)room * 4);
  b->position = sluice_arena_take(&b->memory->binding, (uint64_t)num_routes * 4);
}

/* Finds the token of each route; -1: none. The compiler vectorizes shifts, but not divisions. */
static void find_tokens(sluice_binding_t* b) {
  int32_t shift = 0;
  while (1 << shift < b->top_k) ++shift;
  int is_power = 1 << shift == b->top_k;
  for (int64_t s = 0; s < b->num_sent && is_power; ++s) b->order_token[s] = b->order[s] >> shift;
  for (int64_t s = 0; s < b->num_sent && !is_power; ++s) {
    b->order_token[s] = b->order[s] < 0 ? -1 : b->order[s] / b->top_k;
  }
}

static void finish(sluice_binding_t* b) {
  if (b->chunks_by_experts && b->counts_out != NULL)
    sluice_chunks_by_experts_place(b); /* a restored binding has positions */
  find_tokens(b);
}

static char* put(char* at, const int32_t* words, int64_t count) {
  if (count > 0) memcpy(at, words, (size_t)count * sizeof *words);
  return at + (size_t)count * sizeof *words;
}

static char* save(const sluice_binding_t* b, char* at) {
  at = put(at, b->order, b->num_sent);
  return put(at, b->position, b->num_tokens * b->top_k);
}

/* Orders and positions are read in META, without a copy. */
static const int32_t* find(sluice_binding_t* b, const int32_t* at) {
  b->order = (int32_t*)(uintptr_t)at;
  b->position = b->order + b->num_sent;
  return b->position + b->num_tokens * b->top_k;
}

/* All of it is in META. */
static uint64_t kept_bytes(const sluice_binding_t* b) {
  (void)b;
  return 0;
}
static sluice_status_t keep(const sluice_binding_t* b, sluice_stream_t stream, void* kept) {
  (void)b, (void)stream, (void)kept;
  return SLUICE_OK;
}
static void place(sluice_binding_t* b, void* kept) { (void)b, (void)kept; }

const sluice_routes_t sluice_routes_in_host_memory = {.order = order,
                                                      .look = look,
                                                      .sum = sum,
                                                      .order_blocks = order_blocks,
                                                      .check = check,
                                                      .order_capacity = order_capacity,
                                                      .hash = sluice_routes_hash,
                                                      .take_offsets = take_offsets,
                                                      .take_orders = take_orders,
                                                      .finish = finish,
                                                      .save = save,
                                                      .find = find,
                                                      .kept_bytes = kept_bytes,
                                                      .keep = keep,
                                                      .place = place};
