// SPDX-License-Identifier: Apache-2.0
/* Assigns the new groups of experts to ranks so that the fewest bytes move. */
#include <string.h>

#include "backend/planner/placement/placing.h"

enum { UNREACHABLE = -1 };
static const int64_t FAR = INT64_MAX / 4;

/* Groups are rows, ranks are columns; both are counted from 1, and paths begin in column 0. */
typedef struct assignment_s {
  int64_t* cost; /* [n, n] bytes of a group that would move to that rank */
  int64_t* of_group;
  int64_t* of_rank; /* potentials: cost - of_group - of_rank >= 0, and 0 if assigned */
  int64_t* distance;
  int32_t* group_at; /* [n + 1] group of a rank; 0: none yet */
  int32_t* before;   /* the previous rank of a path */
  int32_t* is_done;
  int32_t n;
} assignment_t;

/* Returns the next rank of the path. */
static int32_t extend(assignment_t* x, int32_t from) {
  const int32_t group = x->group_at[from];
  int32_t next = UNREACHABLE;
  for (int32_t r = 1; r <= x->n; ++r) {
    if (x->is_done[r]) continue;
    const int64_t more =
        x->cost[(size_t)(group - 1) * (size_t)x->n + (size_t)(r - 1)] - x->of_group[group] - x->of_rank[r];
    if (more < x->distance[r]) x->distance[r] = more, x->before[r] = from;
    if (next == UNREACHABLE || x->distance[r] < x->distance[next]) next = r;
  }
  const int64_t step = x->distance[next];
  for (int32_t r = 0; r <= x->n; ++r) {
    if (x->is_done[r]) {
      x->of_group[x->group_at[r]] += step, x->of_rank[r] -= step;
    } else {
      x->distance[r] -= step;
    }
  }
  return next;
}

static void add_group(assignment_t* x, int32_t group) {
  int32_t at = 0;
  x->group_at[0] = group;
  for (int32_t r = 0; r <= x->n; ++r) x->distance[r] = FAR, x->is_done[r] = 0;
  do {
    x->is_done[at] = 1;
    at = extend(x, at);
  } while (x->group_at[at] != 0);
  for (; at != 0; at = x->before[at]) x->group_at[at] = x->group_at[x->before[at]];
}

static void fill_costs(const sluice_placing_t* s, assignment_t* x) {
  const sluice_placing_problem_t* p = s->problem;
  const size_t n = (size_t)x->n;
  for (size_t g = 0; g < n; ++g) {
    int64_t bytes = 0;
    for (int32_t i = p->first[g]; i < p->first[g + 1]; ++i) bytes += (int64_t)p->bytes[s->members[i]];
    for (size_t r = 0; r < n; ++r) x->cost[g * n + r] = p->capacity[g] == p->capacity[r] ? bytes : FAR / (int64_t)n;
  }
  for (int32_t e = 0; e < p->num_experts; ++e) {
    const size_t g = (size_t)s->rank[e], r = (size_t)p->home[e];
    if (p->capacity[g] == p->capacity[r]) x->cost[g * n + r] -= (int64_t)p->bytes[e];
  }
}

sluice_status_t sluice_relabel(sluice_placing_t* placing, sluice_allocator_t* allocator) {
  const sluice_placing_problem_t* p = placing->problem;
  const uint64_t n = (uint64_t)p->num_ranks, e = (uint64_t)p->num_experts;
  const uint64_t bytes = (n * n + 3 * (n + 1)) * sizeof(int64_t) + (3 * (n + 1) + e) * sizeof(int32_t);
  int64_t* block = sluice_alloc_zeroed(allocator, bytes, "names of ranks");
  if (block == NULL) return sluice_alloc_status();
  assignment_t x = {.cost = block, .n = p->num_ranks};
  x.of_group = block + n * n, x.of_rank = x.of_group + n + 1, x.distance = x.of_rank + n + 1;
  x.group_at = (int32_t*)(x.distance + n + 1), x.before = x.group_at + n + 1, x.is_done = x.before + n + 1;
  int32_t* rank = x.is_done + n + 1;
  fill_costs(placing, &x);
  for (int32_t group = 1; group <= x.n; ++group) add_group(&x, group);
  for (int32_t r = 1; r <= x.n; ++r) {
    const int32_t g = x.group_at[r] - 1;
    for (int32_t i = p->first[g]; i < p->first[g + 1]; ++i) rank[placing->members[i]] = r - 1;
  }
  sluice_placing_set(placing, rank);
  sluice_free(allocator, block, bytes);
  return SLUICE_OK;
}
