// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/placing.h"

#include <string.h>

#include "backend/base/math.h"

static uint64_t bytes_of(const sluice_placing_problem_t* p) {
  return (uint64_t)p->num_experts * 3 * sizeof(int32_t) + (uint64_t)p->num_ranks * sizeof(uint64_t);
}

sluice_status_t sluice_placing_make(const sluice_placing_problem_t* problem, sluice_allocator_t* allocator,
                                    sluice_placing_t* out) {
  uint64_t* block = sluice_alloc(allocator, bytes_of(problem), "a placement");
  if (block == NULL) return sluice_alloc_status();
  int32_t* numbers = (int32_t*)(block + problem->num_ranks);
  *out = (sluice_placing_t){.problem = problem,
                            .rank = numbers,
                            .at = numbers + problem->num_experts,
                            .members = numbers + 2 * (size_t)problem->num_experts,
                            .load = block};
  sluice_placing_set(out, problem->home);
  return SLUICE_OK;
}

void sluice_placing_deinit(sluice_placing_t* placing, sluice_allocator_t* allocator) {
  if (placing->load != NULL) sluice_free(allocator, placing->load, bytes_of(placing->problem));
  placing->load = NULL;
}

void sluice_placing_set(sluice_placing_t* placing, const int32_t* rank) {
  const sluice_placing_problem_t* p = placing->problem;
  if (rank != placing->rank) memcpy(placing->rank, rank, (size_t)p->num_experts * sizeof *rank);
  memset(placing->load, 0, (size_t)p->num_ranks * sizeof *placing->load);
  placing->bytes = 0;
  for (int32_t e = 0; e < p->num_experts; ++e) {
    const int32_t r = placing->rank[e];
    const int32_t at = p->first[r] + (int32_t)placing->load[r]++; /* load counts the members so far */
    placing->members[at] = e, placing->at[e] = at;
    if (r != p->home[e]) placing->bytes += p->bytes[e];
  }
  for (int32_t r = 0; r < p->num_ranks; ++r) {
    placing->load[r] = 0;
    for (int32_t at = p->first[r]; at < p->first[r + 1]; ++at) placing->load[r] += p->loads[placing->members[at]];
  }
}

void sluice_placing_swap(sluice_placing_t* placing, int32_t a, int32_t b) {
  const sluice_placing_problem_t* p = placing->problem;
  const int32_t ra = placing->rank[a], rb = placing->rank[b], at = placing->at[a];
  placing->bytes += (uint64_t)(sluice_placing_cost(p, a, ra, rb) + sluice_placing_cost(p, b, rb, ra));
  placing->load[ra] = placing->load[ra] - p->loads[a] + p->loads[b];
  placing->load[rb] = placing->load[rb] - p->loads[b] + p->loads[a];
  placing->rank[a] = rb, placing->rank[b] = ra;
  placing->at[a] = placing->at[b], placing->at[b] = at;
  placing->members[placing->at[a]] = a, placing->members[placing->at[b]] = b;
}

int32_t sluice_placing_fullest(const sluice_placing_t* placing) {
  int32_t fullest = 0;
  for (int32_t r = 1; r < placing->problem->num_ranks; ++r) {
    if (placing->load[r] > placing->load[fullest]) fullest = r;
  }
  return fullest;
}

sluice_placing_score_t sluice_placing_score(const sluice_placing_t* placing) {
  const uint64_t load = placing->load[sluice_placing_fullest(placing)];
  return (sluice_placing_score_t){sluice_max_u64(load, placing->problem->limit), placing->bytes, load};
}

int sluice_placing_is_better(sluice_placing_score_t a, sluice_placing_score_t b) {
  if (a.excess != b.excess) return a.excess < b.excess;
  return a.bytes != b.bytes ? a.bytes < b.bytes : a.load < b.load;
}

uint64_t sluice_placing_bound(const sluice_placing_problem_t* p) {
  uint64_t total = 0;
  int32_t ranks = 0, fewest = p->num_experts;
  for (int32_t e = 0; e < p->num_experts; ++e) total += p->loads[e];
  for (int32_t r = 0; r < p->num_ranks; ++r) {
    if (p->capacity[r] == 0) continue;
    fewest = sluice_min_i32(fewest, p->capacity[r]), ++ranks;
  }
  uint64_t bound = sluice_ceil_div_u64(total, (uint64_t)ranks);
  for (int32_t k = 0; k * ranks < p->num_experts; ++k) {
    uint64_t load = 0;
    for (int32_t i = k * ranks; i >= k * ranks - k; --i) load += p->loads[p->by_load[i]];
    for (int32_t i = k + 1; i < fewest; ++i) load += p->loads[p->by_load[p->num_experts - (i - k)]];
    bound = sluice_max_u64(bound, load);
  }
  return bound;
}
