// SPDX-License-Identifier: Apache-2.0
/* Routes in host memory: the calling thread counts them by place and orders them by a counting sort, and META holds
 * them between calls. */
#include <string.h>

#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/chunks_by_experts.h"
#include "backend/moe/routing/chunks_by_tokens.h"
#include "backend/moe/routing/route_ids.h"
#include "backend/moe/routing/routes.h"

/* ---- by places ---- */

/* Counts routes per chunk and place; leaves each route's place in `position`. */
static sluice_status_t count_routes(sluice_binding_t* b, const sluice_tensor_t* expert_ids) {
  sluice_id_reader_t reader = sluice_id_reader(expert_ids);
  int32_t num_experts = b->moe->shape.config.num_experts;
  memset(b->send_counts, 0, (size_t)b->num_chunks * (size_t)num_experts * sizeof(int32_t));
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int32_t* counts = b->send_counts + (int64_t)i * num_experts;
    for (int64_t t = b->first_token[i]; t < b->first_token[i + 1]; ++t) {
      for (int32_t k = 0; k < b->top_k; ++k) {
        int32_t place = 0;
        SLUICE_TRY(sluice_place_of_route(b->moe, &reader, t, k, &place));
        b->position[t * b->top_k + k] = place;
        if (place >= 0) ++counts[place];
      }
    }
  }
  return SLUICE_OK;
}

/* Turns places into rows of the sent order: a counting sort that keeps (token, k) order within a place. */
static void sort_routes(sluice_binding_t* b, int64_t* cursor) {
  int32_t num_experts = b->moe->shape.config.num_experts;
  int64_t first = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int32_t* counts = b->send_counts + (int64_t)i * num_experts;
    b->first_sent[i] = first;
    int64_t row = 0;
    for (int32_t place = 0; place < num_experts; ++place) {
      cursor[place] = row;
      row += counts[place];
    }
    for (int64_t route = b->first_token[i] * b->top_k; route < b->first_token[i + 1] * b->top_k; ++route) {
      int32_t place = b->position[route];
      if (place < 0) continue;
      int64_t at = cursor[place]++;
      b->position[route] = (int32_t)at;
      b->order[first + at] = (int32_t)route;
    }
    first += row;
  }
  b->first_sent[b->num_chunks] = first;
  b->num_sent = first;
}

sluice_status_t sluice_binding_route(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                     const int64_t* first_token, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  SLUICE_TRY(sluice_binding_take_arrays(moe, expert_ids->shape[0], num_chunks, first_token, b, &cursor));
  SLUICE_TRY(count_routes(b, expert_ids));
  sort_routes(b, cursor);
  sluice_binding_receive_own(b);
  return SLUICE_OK;
}

/* The same with chunks cut out of rows (chunks_by_experts.h). */
static sluice_status_t route_rows(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                  sluice_binding_t* b) {
  int64_t* counts = NULL;
  int64_t num_tokens = expert_ids->shape[0];
  SLUICE_TRY(sluice_binding_take_arrays(moe, num_tokens, num_chunks, NULL, b, &counts));
  b->chunks_by_experts = 1;
  for (int32_t i = 0; i < num_chunks; ++i) b->first_token[i] = 0;
  /* Counts all routes in the last chunk, which has all tokens for now. */
  SLUICE_TRY(count_routes(b, expert_ids));
  for (int32_t p = 0; p < moe->shape.config.num_experts; ++p) counts[p] = sluice_send_count(b, num_chunks - 1, p);
  sluice_chunks_by_experts_order(b, counts);
  sluice_binding_receive_own(b);
  return SLUICE_OK;
}

/* ---- under capacities ---- */

/* As sort_routes, with places of `capacity` rows: the first routes of a place take its rows, others are dropped. */
static void order_under_capacity(sluice_binding_t* b, int64_t* cursor, int64_t* drop_counters) {
  int64_t capacity = sluice_shape_capacity(&b->moe->shape);
  int32_t num_experts = b->moe->shape.config.num_experts;
  memset(b->order, 0xff, (size_t)sluice_binding_room(&b->moe->shape, b->num_chunks, b->num_tokens) * sizeof *b->order);
  ++drop_counters[SLUICE_DROP_COUNTER_FORWARDS];
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int32_t* order = b->order + (int64_t)i * num_experts * capacity;
    memset(cursor, 0, (size_t)num_experts * sizeof *cursor);
    for (int64_t route = b->first_token[i] * b->top_k; route < b->first_token[i + 1] * b->top_k; ++route) {
      int32_t place = b->position[route];
      if (place < 0) continue;
      int64_t at = cursor[place]++;
      b->position[route] = at < capacity ? (int32_t)(place * capacity + at) : -1;
      if (at < capacity) order[place * capacity + at] = (int32_t)route;
    }
    for (int32_t place = 0; place < num_experts; ++place) {
      int64_t most = (cursor[place] << 32) + place;
      drop_counters[SLUICE_DROP_COUNTER_ROUTES] += cursor[place];
      if (cursor[place] > capacity) drop_counters[SLUICE_DROP_COUNTER_DROPPED] += cursor[place] - capacity;
      if (most > drop_counters[SLUICE_DROP_COUNTER_MOST]) drop_counters[SLUICE_DROP_COUNTER_MOST] = most;
    }
  }
}

/* Each position of a chunk gets exactly the layer's capacity of rows, so that no counts are read or exchanged. Routes
 * beyond it are dropped (position -1) and added to the drop counters (device/drop_counters.h), which lie in row memory.
 * Rows that no route takes are -1 in the orders. */
static sluice_status_t order_capacity(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                      int32_t num_chunks, int64_t* drop_counters, sluice_binding_t* b) {
  (void)stream;
  int64_t* cursor = NULL;
  SLUICE_TRY(sluice_binding_take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  SLUICE_TRY(count_routes(b, expert_ids));
  order_under_capacity(b, cursor, drop_counters);
  sluice_binding_fill_counts(b);
  return SLUICE_OK;
}

/* ---- the table of functions ---- */

static sluice_status_t order(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                             int32_t num_chunks, sluice_binding_t* b) {
  (void)stream;
  sluice_shape_t shape = moe->shape;
  sluice_shape_take_deduplication(&shape, b->deduplicate);
  return sluice_shape_chunks_by_experts(&shape, num_chunks)
             ? route_rows(moe, expert_ids, num_chunks, b)
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

static uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

static uint64_t hash(const sluice_moe_t* moe, const sluice_tensor_t* expert_ids) {
  const sluice_id_reader_t reader = sluice_id_reader(expert_ids);
  uint64_t value = mix(1, (uint64_t)expert_ids->shape[0]);
  for (int64_t t = 0; t < expert_ids->shape[0]; ++t) {
    for (int32_t k = 0; k < moe->shape.config.top_k; ++k) value = mix(value, (uint64_t)sluice_read_id(&reader, t, k));
  }
  return value != 0 ? value : 1; /* 0: the ids are not read */
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

/* META holds all that a step keeps. */
const sluice_routes_t sluice_routes_in_host_memory = {.order = order,
                                                      .look = look,
                                                      .sum = sum,
                                                      .order_blocks = order_blocks,
                                                      .check = check,
                                                      .order_capacity = order_capacity,
                                                      .hash = hash,
                                                      .take_offsets = take_offsets,
                                                      .take_orders = take_orders,
                                                      .finish = finish,
                                                      .save = save,
                                                      .find = find};
