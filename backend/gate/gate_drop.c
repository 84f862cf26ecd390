// SPDX-License-Identifier: Apache-2.0
#include "backend/gate/gate_drop.h"

#include <math.h>

static int64_t up(int64_t bytes) { return (bytes + 15) / 16 * 16; }

sluice_status_t sluice_gate_drop_create(const sluice_gate_config_t* c, int64_t num_tokens,
                                        sluice_gate_drop_t* out_drop) {
  sluice_gate_drop_t d = {.policy = c->drop_policy,
                          .top_k = c->top_k,
                          .num_experts = c->num_experts,
                          .num_tokens = num_tokens,
                          .capacity = num_tokens};
  if (c->drop_policy != SLUICE_DROP_NONE) d.capacity = sluice_gate_capacity(c, num_tokens);
  if (d.capacity < num_tokens) {
    int64_t routes = num_tokens * c->top_k, parts[5];
    parts[0] = up((int64_t)c->num_experts * 8);
    parts[1] = d.policy == SLUICE_DROP_SCORE ? up(routes * 8) : 0;
    parts[2] = up(routes * 4);
    parts[3] = d.policy == SLUICE_DROP_SCORE ? up(routes * 4) : 0;
    parts[4] = routes;
    for (int i = 0; i < 5; ++i) d.bytes += parts[i];
    char* base = sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)d.bytes, "gate: routes to drop from");
    if (base == NULL) return sluice_alloc_status();
    d.first = (int64_t*)(void*)base;
    d.order = (int64_t*)(void*)(base += parts[0]);
    d.expert = (int32_t*)(void*)(base += parts[1]);
    d.score = (float*)(void*)(base += parts[2]);
    d.keep = base + parts[3];
  }
  *out_drop = d;
  return SLUICE_OK;
}

void sluice_gate_drop_destroy(sluice_gate_drop_t* d) {
  sluice_free(sluice_process_allocator(), d->first, (uint64_t)d->bytes);
}

void sluice_gate_drop_offer(sluice_gate_drop_t* d, int64_t t, int64_t k, int32_t expert, float score) {
  if (d->first == NULL) return;
  d->expert[t * d->top_k + k] = expert;
  if (d->policy == SLUICE_DROP_SCORE) d->score[t * d->top_k + k] = score;
}

/* First come: all first choices in token order, then all second choices, and so on. */
static void decide_by_position(sluice_gate_drop_t* d) {
  for (int64_t k = 0; k < d->top_k; ++k) {
    for (int64_t t = 0; t < d->num_tokens; ++t) {
      int64_t route = t * d->top_k + k;
      d->keep[route] = d->first[d->expert[route]]++ < d->capacity;
    }
  }
}

/* True when route a is kept before route b: the higher score, then the earlier token; a NaN is below every number. */
static int before(const float* score, int64_t a, int64_t b) {
  float x = score[a], y = score[b];
  if (x > y || (isnan(y) && !isnan(x))) return 1;
  if (y > x || (isnan(x) && !isnan(y))) return 0;
  return a < b;
}

/* Heap sort, for it needs no memory: the route that is kept first comes first. */
static void sift(const float* score, int64_t* heap, int64_t at, int64_t count) {
  for (;;) {
    int64_t child = 2 * at + 1;
    if (child >= count) return;
    if (child + 1 < count && before(score, heap[child], heap[child + 1])) ++child;
    if (!before(score, heap[at], heap[child])) return;
    int64_t held = heap[at];
    heap[at] = heap[child];
    heap[child] = held;
    at = child;
  }
}

static void sort_routes(const float* score, int64_t* routes, int64_t count) {
  for (int64_t i = count / 2; i-- > 0;) sift(score, routes, i, count);
  for (int64_t last = count - 1; last > 0; --last) {
    int64_t held = routes[0];
    routes[0] = routes[last];
    routes[last] = held;
    sift(score, routes, 0, last);
  }
}

static void decide_by_score(sluice_gate_drop_t* d, const int64_t* counts) {
  int64_t routes = d->num_tokens * d->top_k, begin = 0;
  for (int32_t e = 0; e < d->num_experts; ++e) {
    d->first[e] = begin;
    begin += counts[e];
  }
  for (int64_t route = 0; route < routes; ++route) d->order[d->first[d->expert[route]]++] = route;
  for (int32_t e = 0; e < d->num_experts; ++e) {
    int64_t* own = d->order + (d->first[e] - counts[e]);
    int64_t kept = counts[e] < d->capacity ? counts[e] : d->capacity;
    if (kept > 0 && kept < counts[e]) sort_routes(d->score, own, counts[e]);
    for (int64_t i = 0; i < kept; ++i) d->keep[own[i]] = 1;
  }
}

void sluice_gate_drop_decide(sluice_gate_drop_t* d, const int64_t* counts) {
  if (d->first == NULL) return;
  if (d->policy == SLUICE_DROP_SCORE) {
    decide_by_score(d, counts);
  } else {
    decide_by_position(d);
  }
}

int sluice_gate_drop_keeps(const sluice_gate_drop_t* d, int64_t t, int64_t k) {
  return d->first == NULL || d->keep[t * d->top_k + k];
}
