// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/plan_placement.h"

#include <math.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/planner/placement/check_placement.h"
#include "backend/planner/placement/exact.h"
#include "backend/planner/placement/relabel.h"
#include "backend/planner/placement/swaps.h"

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

/* ---- working memory ---- */

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
  *out_is_optimal = p->num_experts <= SLUICE_PLACING_EXACT_EXPERTS;
  if (*out_is_optimal) sluice_placing_exact(&d->placing);
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
  SLUICE_TRY(sluice_placement_check_problem(problem));
  desk_t d;
  SLUICE_TRY(open_desk(problem, allocator, &d));
  int32_t is_optimal = 0;
  sluice_status_t status = sluice_placement_check_slots(problem, d.first, d.scratch);
  if (status == SLUICE_OK) status = plan(&d, allocator, &is_optimal);
  if (status == SLUICE_OK) fill_result(&d, problem, is_optimal, result);
  close_desk(&d, allocator);
  return status;
}
