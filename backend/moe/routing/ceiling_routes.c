/* Under ceilings every place has the same number of rows in each chunk, on all ranks. */
#include "backend/moe/routing/ceiling_routes.h"

#include <string.h>

#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/host_routes.h"

void sluice_binding_fill_counts(sluice_binding_t* b) {
  int32_t ceiling = (int32_t)sluice_shape_ceiling(&b->moe->shape);
  int64_t sent = (int64_t)b->num_chunks * b->moe->shape.config.num_experts;
  int64_t received = (int64_t)b->world_size * b->num_chunks * b->num_local;
  for (int64_t i = 0; i < sent; ++i) b->send_counts[i] = ceiling;
  for (int64_t i = 0; i < received; ++i) b->recv_counts[i] = ceiling;
  b->num_sent = sluice_binding_room(&b->moe->shape, b->num_chunks, b->num_tokens);
  for (int32_t i = 0; i < b->num_chunks; ++i) b->first_sent[i] = b->num_sent / b->num_chunks * i;
  b->first_sent[b->num_chunks] = b->num_sent; /* as many of each chunk */
}

/* As order_routes, on places of `ceiling` rows: the first routes of a place take them, the others are dropped. */
static void order_under_ceiling(sluice_binding_t* b, int64_t* cursor, int64_t* tally) {
  int64_t ceiling = sluice_shape_ceiling(&b->moe->shape);
  int32_t num_experts = b->moe->shape.config.num_experts;
  memset(b->order, 0xff, (size_t)sluice_binding_room(&b->moe->shape, b->num_chunks, b->num_tokens) * sizeof *b->order);
  ++tally[SLUICE_TALLY_FORWARDS];
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int32_t* order = b->order + (int64_t)i * num_experts * ceiling;
    memset(cursor, 0, (size_t)num_experts * sizeof *cursor);
    for (int64_t route = b->first_token[i] * b->top_k; route < b->first_token[i + 1] * b->top_k; ++route) {
      int32_t place = b->position[route];
      if (place < 0) continue;
      int64_t at = cursor[place]++;
      b->position[route] = at < ceiling ? (int32_t)(place * ceiling + at) : -1;
      if (at < ceiling) order[place * ceiling + at] = (int32_t)route;
    }
    for (int32_t place = 0; place < num_experts; ++place) {
      int64_t most = (cursor[place] << 32) + place;
      tally[SLUICE_TALLY_ROUTES] += cursor[place];
      if (cursor[place] > ceiling) tally[SLUICE_TALLY_DROPPED] += cursor[place] - ceiling;
      if (most > tally[SLUICE_TALLY_MOST]) tally[SLUICE_TALLY_MOST] = most;
    }
  }
}

sluice_status_t sluice_binding_route_under_ceiling(sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                                   int32_t num_chunks, int64_t* tally, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  SLUICE_TRY(sluice_binding_take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  SLUICE_TRY(sluice_binding_count_routes(b, expert_ids));
  order_under_ceiling(b, cursor, tally);
  sluice_binding_fill_counts(b);
  return SLUICE_OK;
}
