// SPDX-License-Identifier: Apache-2.0
/* Swaps that reduce the load of the fullest rank, and swaps that return experts to their home rank. */
#include "backend/base/math.h"
#include "backend/planner/placement/placing.h"

enum {
  MOST_PLACES = 8,   /* of a rank: with more, single swaps are fine-grained enough, and pairs would take long */
  MOST_COMPOUND = 24 /* changes of several experts at once, in one search */
};

/* Swaps one expert of the fullest rank for one of another, or two for two; with `third`, a takes the place of b, b that
 * of c, and c that of a. -1: none. */
typedef struct change_s {
  uint64_t load; /* of the fullest rank involved, after the change */
  int64_t bytes; /* additional bytes that move */
  int32_t a, b, second_a, second_b, third;
} change_t;

static const change_t NONE = {UINT64_MAX, 0, -1, -1, -1, -1, -1};

/* Loads below the limit count as equal. */
static void take_better(const sluice_placing_problem_t* p, change_t* best, const change_t* other) {
  const uint64_t mine = sluice_max_u64(best->load, p->limit), its = sluice_max_u64(other->load, p->limit);
  if (its < mine ||
      (its == mine && (other->bytes < best->bytes || (other->bytes == best->bytes && other->load < best->load)))) {
    *best = *other;
  }
}

static void apply(sluice_placing_t* s, const change_t* c) {
  sluice_placing_swap(s, c->a, c->b);
  if (c->second_a >= 0) sluice_placing_swap(s, c->second_a, c->second_b);
  if (c->third >= 0) sluice_placing_swap(s, c->b, c->third); /* b now has the old place of a */
}

static change_t best_single(const sluice_placing_t* s, int32_t full) {
  const sluice_placing_problem_t* p = s->problem;
  const uint64_t before = s->load[full];
  change_t best = NONE;
  for (int32_t i = p->first[full]; i < p->first[full + 1]; ++i) {
    const int32_t a = s->members[i];
    for (int32_t b = 0; b < p->num_experts; ++b) {
      const int32_t r = s->rank[b];
      if (r == full || p->loads[b] >= p->loads[a]) continue;
      const uint64_t less = p->loads[a] - p->loads[b];
      const uint64_t load = sluice_max_u64(before - less, s->load[r] + less);
      if (load >= before) continue;
      const int64_t bytes = sluice_placing_cost(p, a, full, r) + sluice_placing_cost(p, b, r, full);
      const change_t c = {load, bytes, a, b, -1, -1, -1};
      take_better(p, &best, &c);
    }
  }
  return best;
}

/* Tries to swap two experts of the fullest rank with two of rank r. */
static void try_pairs(const sluice_placing_t* s, int32_t full, int32_t r, change_t* best) {
  const sluice_placing_problem_t* p = s->problem;
  const int32_t *h = s->members + p->first[full], *q = s->members + p->first[r];
  for (int32_t i = 0; i < p->capacity[full]; ++i) {
    for (int32_t j = 0; j < i; ++j) {
      for (int32_t k = 0; k < p->capacity[r]; ++k) {
        for (int32_t l = 0; l < k; ++l) {
          const uint64_t out = p->loads[h[i]] + p->loads[h[j]], in = p->loads[q[k]] + p->loads[q[l]];
          if (in >= out) continue;
          const uint64_t load = sluice_max_u64(s->load[full] - out + in, s->load[r] + out - in);
          if (load >= s->load[full]) continue;
          const int64_t bytes = sluice_placing_cost(p, h[i], full, r) + sluice_placing_cost(p, h[j], full, r) +
                                sluice_placing_cost(p, q[k], r, full) + sluice_placing_cost(p, q[l], r, full);
          const change_t c = {load, bytes, h[i], q[k], h[j], q[l], -1};
          take_better(p, best, &c);
        }
      }
    }
  }
}

/* Tries to move expert a from the fullest rank to rank r, whose b moves to a third rank, whose c moves to the
 * fullest. */
static void try_turns(const sluice_placing_t* s, int32_t full, int32_t r, change_t* best) {
  const sluice_placing_problem_t* p = s->problem;
  const uint64_t before = s->load[full];
  for (int32_t i = p->first[full]; i < p->first[full + 1]; ++i) {
    const int32_t a = s->members[i];
    for (int32_t j = p->first[r]; j < p->first[r + 1]; ++j) {
      const int32_t b = s->members[j];
      const uint64_t mid = s->load[r] - p->loads[b] + p->loads[a];
      if (mid >= before) continue;
      for (int32_t c = 0; c < p->num_experts; ++c) {
        const int32_t t = s->rank[c];
        if (t == full || t == r || p->loads[c] >= p->loads[a]) continue;
        const uint64_t far = s->load[t] - p->loads[c] + p->loads[b];
        const uint64_t load = sluice_max_u64(sluice_max_u64(mid, far), before - p->loads[a] + p->loads[c]);
        if (load >= before) continue;
        const int64_t bytes =
            sluice_placing_cost(p, a, full, r) + sluice_placing_cost(p, b, r, t) + sluice_placing_cost(p, c, t, full);
        const change_t change = {load, bytes, a, b, -1, -1, c};
        take_better(p, best, &change);
      }
    }
  }
}

static change_t best_compound(const sluice_placing_t* s, int32_t full) {
  const sluice_placing_problem_t* p = s->problem;
  change_t best = NONE;
  if (p->capacity[full] > MOST_PLACES) return best;
  for (int32_t r = 0; r < p->num_ranks; ++r) {
    if (r == full || p->capacity[r] > MOST_PLACES) continue;
    try_pairs(s, full, r, &best);
    try_turns(s, full, r, &best);
  }
  return best;
}

/* Terminates: each change makes the sorted list of loads smaller. */
void sluice_swaps_level(sluice_placing_t* placing) {
  const sluice_placing_problem_t* p = placing->problem;
  for (int32_t num_compound = 0;;) {
    const int32_t full = sluice_placing_fullest(placing);
    if (placing->load[full] <= p->limit) return;
    change_t best = best_single(placing, full);
    if (best.a < 0 && num_compound++ < MOST_COMPOUND) best = best_compound(placing, full);
    if (best.a < 0) return;
    apply(placing, &best);
  }
}

/* Returns the best swap that returns expert e to its home rank: any expert there may take e's place. */
static change_t best_return(const sluice_placing_t* s, int32_t e, uint64_t allowed) {
  const sluice_placing_problem_t* p = s->problem;
  const int32_t away = s->rank[e], home = p->home[e];
  change_t best = NONE;
  for (int32_t i = p->first[home]; i < p->first[home + 1]; ++i) {
    const int32_t f = s->members[i];
    const int64_t bytes = sluice_placing_cost(p, e, away, home) + sluice_placing_cost(p, f, home, away);
    const uint64_t there = s->load[home] - p->loads[f] + p->loads[e], here = s->load[away] - p->loads[e] + p->loads[f];
    const uint64_t load = sluice_max_u64(there, here);
    if (bytes >= 0 || load > allowed) continue;
    if (best.a < 0 || bytes < best.bytes || (bytes == best.bytes && load < best.load)) {
      best = (change_t){load, bytes, e, f, -1, -1, -1};
    }
  }
  return best;
}

void sluice_swaps_return(sluice_placing_t* placing) {
  const sluice_placing_problem_t* p = placing->problem;
  const uint64_t allowed = sluice_max_u64(p->limit, placing->load[sluice_placing_fullest(placing)]);
  for (int changed = 1; changed;) {
    changed = 0;
    for (int32_t e = 0; e < p->num_experts; ++e) {
      if (placing->rank[e] == p->home[e]) continue;
      const change_t best = best_return(placing, e, allowed);
      if (best.a < 0) continue;
      apply(placing, &best);
      changed = 1;
    }
  }
}
