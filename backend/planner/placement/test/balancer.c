// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/test/balancer.h"

#include <stdlib.h>

#include "backend/planner/placement/relabel.h"

static int32_t heaviest(const uint64_t* loads, const int32_t* rank, int32_t num_experts) {
  int32_t best = -1;
  for (int32_t e = 0; e < num_experts; ++e) {
    if (rank[e] < 0 && (best < 0 || loads[e] > loads[best])) best = e;
  }
  return best;
}

static void pack(const uint64_t* loads, int32_t num_experts, int32_t num_ranks, int32_t* out_rank) {
  uint64_t* load = calloc((size_t)num_ranks, sizeof *load);
  int32_t* count = calloc((size_t)num_ranks, sizeof *count);
  for (int32_t e = 0; e < num_experts; ++e) out_rank[e] = -1;
  for (int32_t i = 0; i < num_experts; ++i) {
    const int32_t e = heaviest(loads, out_rank, num_experts);
    int32_t least = -1;
    for (int32_t r = 0; r < num_ranks; ++r) {
      if (count[r] < num_experts / num_ranks && (least < 0 || load[r] < load[least])) least = r;
    }
    out_rank[e] = least, load[least] += loads[e], ++count[least];
  }
  free(load);
  free(count);
}

int32_t balancer_place(const uint64_t* loads, int32_t num_experts, int32_t num_ranks, int32_t* inout_rank,
                       uint64_t* out_load) {
  uint64_t* bytes = calloc((size_t)num_experts, sizeof *bytes);
  int32_t* capacity = calloc((size_t)num_ranks, sizeof *capacity);
  int32_t* first = calloc((size_t)num_ranks + 1, sizeof *first);
  int32_t* rank = calloc((size_t)num_experts, sizeof *rank);
  for (int32_t e = 0; e < num_experts; ++e) bytes[e] = 1;
  for (int32_t r = 0; r < num_ranks; ++r) {
    capacity[r] = num_experts / num_ranks, first[r + 1] = first[r] + capacity[r];
  }
  const sluice_placing_problem_t problem = {loads, inout_rank, bytes, NULL,        capacity,
                                            first, 0,          0,     num_experts, num_ranks};
  sluice_placing_t placing;
  if (sluice_placing_make(&problem, sluice_process_allocator(), &placing) != SLUICE_OK) abort();
  pack(loads, num_experts, num_ranks, rank);
  sluice_placing_set(&placing, rank);
  if (sluice_relabel(&placing, sluice_process_allocator()) != SLUICE_OK) abort();
  const sluice_placing_score_t score = sluice_placing_score(&placing);
  for (int32_t e = 0; e < num_experts; ++e) rank[e] = placing.rank[e];
  sluice_placing_deinit(&placing, sluice_process_allocator());
  for (int32_t e = 0; e < num_experts; ++e) inout_rank[e] = rank[e];
  *out_load = score.load;
  free(bytes), free(capacity), free(first), free(rank);
  return (int32_t)score.bytes;
}
