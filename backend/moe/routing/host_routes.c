// SPDX-License-Identifier: Apache-2.0
/* Orders routes in host memory: counted by place, ordered by a counting sort. */
#include "backend/moe/routing/host_routes.h"

#include <string.h>

#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/chunks_by_experts.h"
#include "backend/moe/routing/route_ids.h"

sluice_status_t sluice_binding_count_routes(sluice_binding_t* b, const sluice_tensor_t* expert_ids) {
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
  SLUICE_TRY(sluice_binding_count_routes(b, expert_ids));
  sort_routes(b, cursor);
  sluice_binding_receive_own(b);
  return SLUICE_OK;
}

sluice_status_t sluice_binding_route_rows(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                          sluice_binding_t* b) {
  int64_t* counts = NULL;
  int64_t num_tokens = expert_ids->shape[0];
  SLUICE_TRY(sluice_binding_take_arrays(moe, num_tokens, num_chunks, NULL, b, &counts));
  b->chunks_by_experts = 1;
  for (int32_t i = 0; i < num_chunks; ++i) b->first_token[i] = 0;
  /* Counts all routes in the last chunk, which has all tokens for now. */
  SLUICE_TRY(sluice_binding_count_routes(b, expert_ids));
  for (int32_t p = 0; p < moe->shape.config.num_experts; ++p) counts[p] = sluice_send_count(b, num_chunks - 1, p);
  sluice_chunks_by_experts_order(b, counts);
  sluice_binding_receive_own(b);
  return SLUICE_OK;
}
