// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/bound.h"

#include "backend/base/math.h"

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
