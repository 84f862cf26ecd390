// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/check_placement.h"

#include <math.h>
#include <string.h>

#include "backend/base/status.h"

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

sluice_status_t sluice_placement_check_problem(const sluice_placement_problem_t* p) {
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

sluice_status_t sluice_placement_check_slots(const sluice_placement_problem_t* p, const int32_t* first,
                                             int32_t* taken) {
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
