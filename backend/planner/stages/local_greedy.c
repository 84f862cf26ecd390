// SPDX-License-Identifier: Apache-2.0
/* Chooses the options of a stage by vPipe's greedy algorithm, and improves a choice by small changes. */
#include <math.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/planner/stages/local.h"

/* Exchanges of two are not tried with more layers: single changes leave little to gain there. */
enum { MOST_LAYERS_TO_EXCHANGE = 40 };

/* ---- the cost of changes, in constant time ---- */

/* The three largest values of a term, which give the largest without any two layers. */
typedef struct largest_s {
  uint64_t value[3];
  int32_t layer[3];
} largest_t;

static void largest_add(largest_t* l, uint64_t value, int32_t layer) {
  int at = 3;
  while (at > 0 && (l->layer[at - 1] < 0 || value > l->value[at - 1])) --at;
  for (int i = 2; i > at; --i) l->value[i] = l->value[i - 1], l->layer[i] = l->layer[i - 1];
  if (at < 3) l->value[at] = value, l->layer[at] = layer;
}

static uint64_t largest_without(const largest_t* l, int32_t a, int32_t b) {
  for (int i = 0; i < 3 && l->layer[i] >= 0; ++i) {
    if (l->layer[i] != a && l->layer[i] != b) return l->value[i];
  }
  return 0;
}

typedef struct state_s {
  sluice_stages_local_t* local;
  sluice_stages_local_sum_t sum;
  uint64_t additive; /* bytes without the maxima */
  largest_t working;
  largest_t staging;
  largest_t arena;
} state_t;

static void measure(state_t* s) {
  const sluice_stages_local_t* local = s->local;
  s->sum = sluice_stages_local_sum(local, local->pick);
  s->additive = local->fixed_bytes;
  s->working = s->staging = s->arena = (largest_t){.layer = {-1, -1, -1}};
  for (int32_t i = 0; i < local->count; ++i) {
    const sluice_stages_local_item_t* item = &local->items[local->pick[i]];
    s->additive += item->bytes;
    largest_add(&s->working, item->working, i);
    largest_add(&s->staging, item->staging, i);
    largest_add(&s->arena, item->arena, i);
  }
}

/* Returns the sum with item a in place of its layer's choice, and b in place of its layer's; b may be a. */
static sluice_stages_local_sum_t sum_with(const state_t* s, int32_t a, int32_t b) {
  sluice_stages_local_t* local = s->local;
  ++local->steps;
  const sluice_stages_local_item_t *x = &local->items[a], *y = &local->items[b];
  const sluice_stages_local_item_t *was_x = &local->items[local->pick[x->layer]],
                                   *was_y = &local->items[local->pick[y->layer]];
  sluice_stages_local_sum_t sum = s->sum;
  sum.compute += x->seconds - was_x->seconds, sum.copies += x->copy_seconds - was_x->copy_seconds;
  sum.bytes = s->additive + x->bytes - was_x->bytes;
  if (a != b) {
    sum.compute += y->seconds - was_y->seconds, sum.copies += y->copy_seconds - was_y->copy_seconds;
    sum.bytes += y->bytes - was_y->bytes;
  }
  sum.bytes += sluice_max_u64(largest_without(&s->working, x->layer, y->layer), sluice_max_u64(x->working, y->working));
  sum.bytes += sluice_max_u64(largest_without(&s->staging, x->layer, y->layer), sluice_max_u64(x->staging, y->staging));
  sum.bytes += sluice_max_u64(largest_without(&s->arena, x->layer, y->layer), sluice_max_u64(x->arena, y->arena));
  sum.turn = sluice_stages_turn_seconds(local->tables->problem, sum.compute, local->messages, sum.copies);
  return sum;
}

/* ---- saving bytes, from the fastest choice ---- */

/* Value of a change: those that cost no time come first, by bytes; then by bytes per second. */
typedef struct worth_s {
  int is_free;
  double value;
} worth_t;

static worth_t worth_of(const state_t* s, const sluice_stages_local_sum_t* with, uint64_t saved) {
  const double cost = with->turn - s->sum.turn, compute = with->compute - s->sum.compute;
  if (cost <= 0 && compute <= 0) return (worth_t){1, (double)saved};
  /* More computing is no gain even if messages take longer: time may be short after the next change. */
  return (worth_t){0, (double)saved / fmax(fmax(cost, 0.01 * compute), 1e-300)};
}

static int is_worth_more(worth_t a, worth_t b) { return a.is_free != b.is_free ? a.is_free : a.value > b.value; }

/* Returns the most valuable change; -1: none saves bytes. all: count the largest working and copied bytes and arena as
 * they are; otherwise ignore them, since several layers share each maximum and the first of them to change saves
 * nothing. */
static int32_t best_saving(const state_t* s, int all) {
  const sluice_stages_local_t* local = s->local;
  worth_t best = {0, 0};
  int32_t best_item = -1;
  for (int32_t a = 0; a < local->first[local->count]; ++a) {
    const sluice_stages_local_item_t *item = &local->items[a], *now = &local->items[local->pick[item->layer]];
    const sluice_stages_local_sum_t with = sum_with(s, a, a);
    const uint64_t before = all ? s->sum.bytes : now->bytes, after = all ? with.bytes : item->bytes;
    if (after >= before) continue;
    const worth_t worth = worth_of(s, &with, before - after);
    if (best_item < 0 || is_worth_more(worth, best)) best = worth, best_item = a;
  }
  return best_item;
}

static int descend(state_t* s) {
  sluice_stages_local_t* local = s->local;
  for (int32_t i = 0; i < local->count; ++i) local->pick[i] = local->first[i];
  measure(s);
  /* Additive bytes may fall while the total does not; they never rise twice, so the loop ends. */
  int all = 1;
  while (s->sum.bytes > local->budget) {
    int32_t item = all ? best_saving(s, 1) : -1;
    if (item < 0) all = 0, item = best_saving(s, 0);
    if (item < 0) return 0;
    local->pick[local->items[item].layer] = item;
    measure(s);
  }
  return 1;
}

/* ---- polish ---- */

static int change_one(state_t* s) {
  sluice_stages_local_t* local = s->local;
  sluice_stages_local_sum_t best = s->sum;
  int32_t best_item = -1;
  for (int32_t a = 0; a < local->first[local->count]; ++a) {
    const sluice_stages_local_sum_t with = sum_with(s, a, a);
    if (with.bytes <= local->budget && sluice_stages_local_is_better(&with, &best)) best = with, best_item = a;
  }
  if (best_item < 0) return 0;
  local->pick[local->items[best_item].layer] = best_item;
  measure(s);
  return 1;
}

static int change_two(state_t* s) {
  sluice_stages_local_t* local = s->local;
  const int32_t num_items = local->first[local->count];
  sluice_stages_local_sum_t best = s->sum;
  int32_t best_a = -1, best_b = -1;
  for (int32_t a = 0; a < num_items; ++a) {
    if (a == local->pick[local->items[a].layer]) continue;
    for (int32_t b = local->first[local->items[a].layer + 1]; b < num_items; ++b) {
      if (b == local->pick[local->items[b].layer]) continue;
      const sluice_stages_local_sum_t with = sum_with(s, a, b);
      if (with.bytes <= local->budget && sluice_stages_local_is_better(&with, &best))
        best = with, best_a = a, best_b = b;
    }
  }
  if (best_a < 0) return 0;
  local->pick[local->items[best_a].layer] = best_a, local->pick[local->items[best_b].layer] = best_b;
  measure(s);
  return 1;
}

static void polish(state_t* s) {
  const int may_exchange = s->local->count <= MOST_LAYERS_TO_EXCHANGE;
  while (change_one(s) || (may_exchange && change_two(s))) {
  }
  s->local->sum = s->sum;
}

void sluice_stages_local_polish(sluice_stages_local_t* local) {
  state_t state = {.local = local};
  measure(&state);
  polish(&state);
}

/* ---- the whole algorithm ---- */

/* No choice computes less than the fastest one, or copies less than nothing. */
static int is_fastest(const sluice_stages_local_t* local) {
  for (int32_t i = 0; i < local->count; ++i) {
    if (local->pick[i] != local->first[i] || local->items[local->pick[i]].staging > 0) return 0;
  }
  return 1;
}

int sluice_stages_local_greedy(sluice_stages_local_t* local) {
  state_t state = {.local = local};
  const size_t bytes = (size_t)local->count * sizeof *local->pick;
  local->is_proven = 1;
  const int fits = descend(&state);
  local->sum = state.sum;
  if (fits && is_fastest(local)) return 1;
  if (fits) {
    polish(&state);
    memcpy(local->best, local->pick, bytes);
  }
  const sluice_stages_local_sum_t down = local->sum;
  sluice_stages_local_leanest(local);
  if (local->sum.bytes > local->budget) return 0;
  sluice_stages_local_polish(local);
  if (fits && !sluice_stages_local_is_better(&local->sum, &down)) {
    memcpy(local->pick, local->best, bytes);
    local->sum = down;
  }
  local->is_proven = local->sum.turn <= local->messages; /* no choice changes messages */
  return 1;
}
