// SPDX-License-Identifier: Apache-2.0
/* The bytes of the tables of node copies, at the capacities of a plan; 0 with one level. */
#include "backend/plan/plan_sizes.h"

/* Returns the maximum number of node copies that a rank receives in a pass, for any ids: every token with its local
 * index. */
static int64_t any_node_copies(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  if (!sluice_shape_has_two_levels(&problem->shape)) return -1;
  return problem->shape.world_size / problem->shape.ranks_per_node * plan->inputs.max_tokens;
}

uint64_t sluice_plan_node_copies_meta_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                            int32_t num_chunks) {
  return sluice_binding_meta_node_copies_bytes(&problem->shape, num_chunks, any_node_copies(problem, plan));
}

/* Returns the maximum number of node copies of a rank's own tokens: the number of routes, or one for each node. */
static int64_t any_sent(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_min(plan->inputs.max_tokens * problem->shape.config.top_k, any_node_copies(problem, plan));
}

/* A message has counts by chunk, and a word for each token. */
uint64_t sluice_plan_node_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int64_t arriving = any_node_copies(problem, plan), tokens = plan->inputs.max_tokens;
  const uint64_t word = sizeof(uint64_t), counts = (uint64_t)plan->max_chunks * sizeof(int32_t);
  if (arriving < 0) return 0;
  const sluice_node_copies_size_t size = {plan->max_chunks, tokens, any_sent(problem, plan), arriving,
                                          (int64_t)(sluice_round_up_u64(counts, word) + (uint64_t)tokens * word)};
  return sluice_align_up(sluice_node_copies_bytes(&problem->shape, &size));
}

uint64_t sluice_plan_device_node_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int64_t arriving = any_node_copies(problem, plan);
  if (arriving < 0) return 0;
  const int64_t forwards = arriving * sluice_min(problem->shape.ranks_per_node, problem->shape.config.top_k);
  return sluice_align_up(sluice_node_copies_on_device_bytes(&problem->shape, plan->inputs.max_tokens,
                                                            any_sent(problem, plan), arriving, forwards));
}
