// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/exact.h"

#include <string.h>

#include "backend/base/math.h"

/* Experts, heaviest first; num_ranks counts the ranks with experts, at most one per expert. */
typedef struct search_s {
  const sluice_placing_problem_t* p;
  int32_t rank_of[SLUICE_PLACING_EXACT_EXPERTS]; /* by number of expert */
  int32_t best_of[SLUICE_PLACING_EXACT_EXPERTS];
  int32_t ranks[SLUICE_PLACING_EXACT_EXPERTS];
  int32_t places[SLUICE_PLACING_EXACT_EXPERTS]; /* free places */
  uint64_t load[SLUICE_PLACING_EXACT_EXPERTS];
  int32_t num_ranks;
  sluice_placing_score_t best;
} search_t;

/* No node below another has a better score than it: loads and bytes only grow. */
static void descend(search_t* x, int32_t depth, uint64_t bytes, uint64_t fullest) {
  const sluice_placing_problem_t* p = x->p;
  const sluice_placing_score_t score = {sluice_max_u64(fullest, p->limit), bytes, sluice_max_u64(fullest, p->bound)};
  if (!sluice_placing_is_better(score, x->best)) return;
  if (depth == p->num_experts) {
    x->best = (sluice_placing_score_t){score.excess, bytes, fullest};
    memcpy(x->best_of, x->rank_of, sizeof x->best_of);
    return;
  }
  const int32_t e = p->by_load[depth];
  for (int32_t i = 0; i < x->num_ranks; ++i) {
    if (x->places[i] == 0) continue;
    --x->places[i];
    x->load[i] += p->loads[e];
    x->rank_of[e] = x->ranks[i];
    descend(x, depth + 1, bytes + (x->ranks[i] == p->home[e] ? 0 : p->bytes[e]), sluice_max_u64(fullest, x->load[i]));
    x->load[i] -= p->loads[e];
    ++x->places[i];
  }
}

void sluice_placing_exact(sluice_placing_t* inout_best) {
  const sluice_placing_problem_t* p = inout_best->problem;
  search_t x = {.p = p, .best = sluice_placing_score(inout_best)};
  memcpy(x.best_of, inout_best->rank, (size_t)p->num_experts * sizeof *x.best_of);
  for (int32_t r = 0; r < p->num_ranks; ++r) {
    if (p->capacity[r] == 0) continue;
    x.ranks[x.num_ranks] = r, x.places[x.num_ranks] = p->capacity[r], ++x.num_ranks;
  }
  descend(&x, 0, 0, 0);
  sluice_placing_set(inout_best, x.best_of);
}
