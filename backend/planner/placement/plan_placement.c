// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/plan_placement.h"

#include <math.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/base/status.h"
#include "backend/planner/placement/placing.h"

/* ---- checks ---- */

enum { MOST_EXPERTS = 4096, MOST_RANKS = 4096 };
static const uint64_t MOST_SUM = 9007199254740992; /* 2^53 */

static sluice_status_t check_sum(const uint64_t* numbers, int32_t count, const char* name) {
  uint64_t sum = 0;
  for (int32_t e = 0; e < count; ++e) {
    SLUICE_TRY(SLUICE_REQUIRE(numbers[e] <= MOST_SUM - sum,
                              "%s[%d] is %llu, but the sum of all is at most 2^53: scale them down", name, e,
                              (unsigned long long)numbers[e]));
    sum += numbers[e];
  }
  return SLUICE_OK;
}

/* Checks everything except the slots. */
static sluice_status_t check_problem(const sluice_placement_problem_t* p) {
  SLUICE_TRY(SLUICE_REQUIRE(p->num_experts >= 1 && p->num_experts <= MOST_EXPERTS,
                            "placement: num_experts is %d; it must be in [1, %d]", p->num_experts, MOST_EXPERTS));
  SLUICE_TRY(SLUICE_REQUIRE(p->num_ranks >= 1 && p->num_ranks <= MOST_RANKS,
                            "placement: num_ranks is %d; it must be in [1, %d]", p->num_ranks, MOST_RANKS));
  SLUICE_TRY(SLUICE_REQUIRE(isfinite(p->target) && p->target >= 1,
                            "placement: target is %g; it must be at least 1 (1: as even as possible)", p->target));
  SLUICE_TRY(SLUICE_REQUIRE(p->loads != NULL && p->expert_rank != NULL && p->expert_slot != NULL,
                            "placement: %s is NULL; give one entry for each expert",
                            p->loads == NULL         ? "loads"
                            : p->expert_rank == NULL ? "expert_rank"
                                                     : "expert_slot"));
  for (int32_t e = 0; e < p->num_experts; ++e) {
    SLUICE_TRY(SLUICE_REQUIRE(p->expert_rank[e] >= 0 && p->expert_rank[e] < p->num_ranks,
                              "placement: expert_rank[%d] is %d; it must be in [0, %d)", e, p->expert_rank[e],
                              p->num_ranks));
  }
  SLUICE_TRY(check_sum(p->loads, p->num_experts, "loads"));
  return p->expert_bytes == NULL ? SLUICE_OK : check_sum(p->expert_bytes, p->num_experts, "expert_bytes");
}

/* Checks that the slots of each rank are 0, 1, .. without gaps. taken: [num_experts] scratch. */
static sluice_status_t check_slots(const sluice_placement_problem_t* p, const int32_t* first, int32_t* taken) {
  memset(taken, 0, (size_t)p->num_experts * sizeof *taken);
  for (int32_t e = 0; e < p->num_experts; ++e) {
    const int32_t r = p->expert_rank[e], slot = p->expert_slot[e], places = first[r + 1] - first[r];
    SLUICE_TRY(SLUICE_REQUIRE(slot >= 0 && slot < places && taken[first[r] + slot] == 0,
                              "placement: expert_slot[%d] is %d: the %d experts of rank %d have the slots 0 to %d, one "
                              "each",
                              e, slot, places, r, places - 1));
    taken[first[r] + slot] = 1;
  }
  return SLUICE_OK;
}

/* ---- working memory ---- */

/* Working memory of a plan. */
typedef struct desk_s {
  sluice_placing_problem_t problem;
  sluice_placing_t placing, other;
  uint64_t* bytes;    /* [E] if the caller gives none */
  int32_t* by_load;   /* [E] */
  int32_t* scratch;   /* [E] */
  int32_t* rank;      /* [E] */
  int32_t* capacity;  /* [W] */
  int32_t* first;     /* [W + 1] */
  uint64_t num_bytes; /* size of the block that begins at `bytes` */
} desk_t;

/* Merge sort, stable: by load, heaviest first, then by number. */
static void sort_by_load(const uint64_t* loads, int32_t* order, int32_t* scratch, int32_t count) {
  for (int32_t e = 0; e < count; ++e) order[e] = e;
  for (int32_t width = 1; width < count; width *= 2) {
    for (int32_t low = 0; low < count; low += 2 * width) {
      const int32_t middle = sluice_min_i32(low + width, count), end = sluice_min_i32(low + 2 * width, count);
      for (int32_t at = low, i = low, j = middle; at < end; ++at) {
        const int is_left = i < middle && (j >= end || loads[order[i]] >= loads[order[j]]);
        scratch[at] = order[is_left ? i++ : j++];
      }
    }
    memcpy(order, scratch, (size_t)count * sizeof *order);
  }
}

static uint64_t limit_of(uint64_t bound, double target) {
  const double limit = floor((double)bound * target);
  return limit >= 9007199254740992.0 ? 9007199254740992u : sluice_max_u64(bound, (uint64_t)limit);
}

static sluice_status_t open_desk(const sluice_placement_problem_t* given, sluice_allocator_t* allocator, desk_t* d) {
  const uint64_t experts = (uint64_t)given->num_experts, ranks = (uint64_t)given->num_ranks;
  *d = (desk_t){.num_bytes = experts * sizeof(uint64_t) + (3 * experts + 2 * ranks + 1) * sizeof(int32_t)};
  d->bytes = sluice_alloc_zeroed(allocator, d->num_bytes, "a plan of where experts live");
  if (d->bytes == NULL) return sluice_alloc_status();
  d->by_load = (int32_t*)(d->bytes + experts), d->scratch = d->by_load + experts, d->rank = d->scratch + experts;
  d->capacity = d->rank + experts, d->first = d->capacity + ranks;
  for (uint64_t e = 0; e < experts; ++e) d->bytes[e] = 1, ++d->capacity[given->expert_rank[e]];
  for (uint64_t r = 0; r < ranks; ++r) d->first[r + 1] = d->first[r] + d->capacity[r];
  sort_by_load(given->loads, d->by_load, d->scratch, given->num_experts);
  d->problem = (sluice_placing_problem_t){
      .loads = given->loads,
      .home = given->expert_rank,
      .bytes = given->expert_bytes == NULL ? d->bytes : given->expert_bytes,
      .by_load = d->by_load,
      .capacity = d->capacity,
      .first = d->first,
      .num_experts = given->num_experts,
      .num_ranks = given->num_ranks,
  };
  d->problem.bound = sluice_placing_bound(&d->problem);
  d->problem.limit = limit_of(d->problem.bound, given->target);
  return SLUICE_OK;
}

static void close_desk(desk_t* d, sluice_allocator_t* allocator) {
  sluice_placing_deinit(&d->other, allocator);
  sluice_placing_deinit(&d->placing, allocator);
  sluice_free(allocator, d->bytes, d->num_bytes);
}

/* ---- the best of all, for few experts ---- */

enum { EXACT_EXPERTS = 12 };

/* Experts, heaviest first; num_ranks counts the ranks with experts, at most one per expert. */
typedef struct search_s {
  const sluice_placing_problem_t* p;
  int32_t rank_of[EXACT_EXPERTS]; /* by number of expert */
  int32_t best_of[EXACT_EXPERTS];
  int32_t ranks[EXACT_EXPERTS];
  int32_t places[EXACT_EXPERTS]; /* free places */
  uint64_t load[EXACT_EXPERTS];
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

/* Makes inout_best the best placement, by branch and bound from its current value. */
static void search_all(sluice_placing_t* inout_best) {
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

/* ---- planning ---- */

/* Assigns experts, heaviest first, to the least loaded rank with a free place. */
static void deal(desk_t* d) {
  const sluice_placing_problem_t* p = &d->problem;
  uint64_t* load = d->other.load;
  int32_t* num = d->scratch; /* by rank: each rank with a place has an expert, so num_experts entries suffice */
  memset(load, 0, (size_t)p->num_ranks * sizeof *load);
  memset(d->rank, 0, (size_t)p->num_experts * sizeof *d->rank);
  int32_t ranks = 0;
  for (int32_t r = 0; r < p->num_ranks; ++r) ranks += p->capacity[r] > 0;
  memset(num, 0, (size_t)ranks * sizeof *num);
  for (int32_t i = 0; i < p->num_experts; ++i) {
    int32_t least = -1, least_at = 0;
    for (int32_t r = 0, at = 0; r < p->num_ranks; ++r) {
      if (p->capacity[r] == 0) continue;
      if (num[at] < p->capacity[r] && (least < 0 || load[r] < load[least])) least = r, least_at = at;
      ++at;
    }
    d->rank[p->by_load[i]] = least;
    load[least] += p->loads[p->by_load[i]], ++num[least_at];
  }
  sluice_placing_set(&d->other, d->rank);
}

static sluice_status_t try_from_nothing(desk_t* d, sluice_allocator_t* allocator) {
  SLUICE_TRY(sluice_placing_make(&d->problem, allocator, &d->other));
  deal(d);
  sluice_swaps_level(&d->other);
  SLUICE_TRY(sluice_relabel(&d->other, allocator));
  sluice_swaps_return(&d->other);
  if (sluice_placing_is_better(sluice_placing_score(&d->other), sluice_placing_score(&d->placing))) {
    sluice_placing_set(&d->placing, d->other.rank);
  }
  return SLUICE_OK;
}

static sluice_status_t plan(desk_t* d, sluice_allocator_t* allocator, int32_t* out_is_optimal) {
  const sluice_placing_problem_t* p = &d->problem;
  SLUICE_TRY(sluice_placing_make(p, allocator, &d->placing));
  sluice_swaps_level(&d->placing);
  sluice_swaps_return(&d->placing);
  if (sluice_placing_score(&d->placing).load > p->limit) SLUICE_TRY(try_from_nothing(d, allocator));
  *out_is_optimal = p->num_experts <= EXACT_EXPERTS;
  if (*out_is_optimal) search_all(&d->placing);
  return SLUICE_OK;
}

/* An expert that stays on its rank keeps its slot; the others take the free slots in the order of their numbers. */
static void give_slots(desk_t* d, const sluice_placement_problem_t* given, int32_t* out_slot) {
  const sluice_placing_problem_t* p = &d->problem;
  memset(d->scratch, 0, (size_t)p->num_experts * sizeof *d->scratch);
  for (int32_t e = 0; e < p->num_experts; ++e) {
    if (d->placing.rank[e] == p->home[e]) d->scratch[p->first[p->home[e]] + given->expert_slot[e]] = 1;
  }
  for (int32_t e = 0; e < p->num_experts; ++e) {
    const int32_t r = d->placing.rank[e];
    int32_t slot = given->expert_slot[e];
    if (r != p->home[e]) {
      for (slot = 0; d->scratch[p->first[r] + slot] != 0;) ++slot;
      d->scratch[p->first[r] + slot] = 1;
    }
    d->rank[e] = slot;
  }
  memcpy(out_slot, d->rank, (size_t)p->num_experts * sizeof *out_slot); /* may be the caller's input */
}

static void fill_result(desk_t* d, const sluice_placement_problem_t* given, int32_t is_optimal,
                        sluice_placement_result_t* result) {
  const sluice_placing_problem_t* p = &d->problem;
  const sluice_placing_score_t score = sluice_placing_score(&d->placing);
  uint64_t total = 0;
  result->num_moves = 0;
  for (int32_t e = 0; e < p->num_experts; ++e) {
    total += p->loads[e];
    result->num_moves += d->placing.rank[e] != p->home[e];
  }
  give_slots(d, given, result->expert_slot);
  result->load = score.load, result->moved_bytes = score.bytes, result->bound_load = p->bound;
  result->mean_load = (double)total / p->num_ranks;
  result->is_optimal = is_optimal;
  memcpy(d->rank, d->placing.rank, (size_t)p->num_experts * sizeof *d->rank);
  sluice_placing_set(&d->placing, p->home);
  result->load_before = sluice_placing_score(&d->placing).load;
  memcpy(result->expert_rank, d->rank, (size_t)p->num_experts * sizeof *d->rank);
}

sluice_status_t sluice_placement_plan(const sluice_placement_problem_t* problem, sluice_allocator_t* allocator,
                                      sluice_placement_result_t* result) {
  SLUICE_TRY(check_problem(problem));
  desk_t d;
  SLUICE_TRY(open_desk(problem, allocator, &d));
  int32_t is_optimal = 0;
  sluice_status_t status = check_slots(problem, d.first, d.scratch);
  if (status == SLUICE_OK) status = plan(&d, allocator, &is_optimal);
  if (status == SLUICE_OK) fill_result(&d, problem, is_optimal, result);
  close_desk(&d, allocator);
  return status;
}

/* ---- whether a move pays ---- */

static sluice_status_t check_time(double value, const char* name) {
  return SLUICE_REQUIRE(isfinite(value) && value >= 0, "move: %s is %g; it must be finite and at least 0", name, value);
}

sluice_status_t sluice_move_verdict(const sluice_planner_move_t* m, int32_t* out_verdict) {
  SLUICE_TRY(check_time(m->step_seconds, "step_seconds"));
  SLUICE_TRY(check_time(m->planned_step_seconds, "planned_step_seconds"));
  SLUICE_TRY(check_time(m->move_seconds, "move_seconds"));
  SLUICE_TRY(check_time(m->horizon_steps, "horizon_steps"));
  SLUICE_TRY(SLUICE_REQUIRE(m->least_gain >= 0 && m->least_gain < 1,
                            "move: least_gain is %g; it must be in [0, 1): a share of a step", m->least_gain));
  SLUICE_TRY(SLUICE_REQUIRE(m->least_steps >= 0, "move: least_steps is %lld; it must be at least 0",
                            (long long)m->least_steps));
  const double gain = m->step_seconds - m->planned_step_seconds;
  *out_verdict = SLUICE_MOVE_PAYS;
  if (gain <= 0) {
    *out_verdict = SLUICE_MOVE_NO_GAIN;
  } else if (gain < m->least_gain * m->step_seconds) {
    *out_verdict = SLUICE_MOVE_SMALL;
  } else if (m->steps_since_move >= 0 && m->steps_since_move < m->least_steps) {
    *out_verdict = SLUICE_MOVE_TOO_SOON;
  } else if (gain * m->horizon_steps <= m->move_seconds) {
    *out_verdict = SLUICE_MOVE_COSTS_MORE;
  }
  return SLUICE_OK;
}
