// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/routing/capacity_routes.h"

#include <string.h>

#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/host_routes.h"

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

/* As order_routes, with places of `capacity` rows: the first routes of a place take its rows, others are dropped. */
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

sluice_status_t sluice_binding_route_under_capacity(sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                                    int32_t num_chunks, int64_t* drop_counters, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  SLUICE_TRY(sluice_binding_take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  SLUICE_TRY(sluice_binding_count_routes(b, expert_ids));
  order_under_capacity(b, cursor, drop_counters);
  sluice_binding_fill_counts(b);
  return SLUICE_OK;
}
