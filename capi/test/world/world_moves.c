// SPDX-License-Identifier: Apache-2.0
/* Experts that change owner between steps. Ranks are threads, so they exchange experts over a shared board. */
#include "capi/test/world/world_split.h"

#include <stdlib.h>

static uint32_t next_number(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* Fills items with a random permutation of [0, count). */
static void shuffle(int32_t* items, int32_t count, uint32_t* state) {
  for (int32_t i = 0; i < count; ++i) items[i] = i;
  for (int32_t i = count - 1; i > 0; --i) {
    const int32_t other = (int32_t)(next_number(state) % (uint32_t)(i + 1)), item = items[i];
    items[i] = items[other], items[other] = item;
  }
}

void world_place_experts(const case_t* c, int32_t move, int32_t* out_owner, int32_t* out_slot) {
  uint32_t state = 77u * (uint32_t)move + (uint32_t)c->moves;
  const int32_t empty = c->world_size > 1 && move % 2 == 1 ? move / 2 % c->world_size : -1;
  int32_t* order = calloc((size_t)c->num_experts, sizeof *order);
  int32_t count[WORLD_MAX_RANKS] = {0};
  shuffle(order, c->num_experts, &state);
  for (int32_t e = 0; e < c->num_experts; ++e) {
    out_owner[e] = world_owner(c, order[e]);
    if (c->moves == WORLD_MOVES_UNEVEN) out_owner[e] = (int32_t)(next_number(&state) % (uint32_t)c->world_size);
    if (c->moves == WORLD_MOVES_UNEVEN && out_owner[e] == empty) out_owner[e] = (empty + 1) % c->world_size;
  }
  shuffle(order, c->num_experts, &state);
  for (int32_t i = 0; i < c->num_experts; ++i) out_slot[order[i]] = count[out_owner[order[i]]]++;
  free(order);
}

int32_t world_experts_of(const case_t* c, int32_t rank, const int32_t* owners, const int32_t* slots, int32_t* out_ids) {
  int32_t count = 0;
  for (int32_t e = 0; e < c->num_experts; ++e) {
    if (owners[e] == rank) out_ids[slots[e]] = e, ++count;
  }
  return count;
}

void world_update(const case_t* c, experts_t* params, const experts_t* grads, int32_t count) {
  for (int kind = 0; kind < NUM_PARAMS && !c->callback_experts; ++kind) {
    const int of = world_param_array(c, kind);
    for (int32_t l = 0; world_param_trained(c, kind) && l < count; ++l) {
      const array_t *p = &params->arrays[of][l], *g = &grads->arrays[of][l];
      world_pull(p);
      world_pull(g);
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        const double step = world_load(world_dtype_of(g), g->host, world_param_place(c, g, kind, i)) / 64;
        const int64_t at = world_param_place(c, p, kind, i);
        world_store(world_dtype_of(p), p->host, at, world_load(world_dtype_of(p), p->host, at) - step);
      }
      world_push(p);
    }
  }
}

void world_put_experts(const case_t* c, const experts_t* x, const int32_t* ids, int32_t count, double* const* board) {
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    const int of = world_param_array(c, kind);
    for (int32_t l = 0; world_param_used(c, kind) && l < count; ++l) {
      const array_t* a = &x->arrays[of][l];
      double* to = board[kind] + ids[l] * world_param_size(c, kind);
      world_pull(a);
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        to[i] = world_load(world_dtype_of(a), a->host, world_param_place(c, a, kind, i));
      }
    }
  }
}

void world_take_experts(const case_t* c, experts_t* x, const int32_t* ids, int32_t count, double* const* board) {
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    const int of = world_param_array(c, kind);
    for (int32_t l = 0; world_param_used(c, kind) && l < count; ++l) {
      const array_t* a = &x->arrays[of][l];
      const double* from = board[kind] + ids[l] * world_param_size(c, kind);
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        world_store(world_dtype_of(a), a->host, world_param_place(c, a, kind, i), from[i]);
      }
      world_push(a);
    }
  }
}
