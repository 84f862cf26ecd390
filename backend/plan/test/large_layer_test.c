// SPDX-License-Identifier: Apache-2.0
/* Plans a layer of 1,024 experts on 256 ranks in one process, which links only base, model, schedule and plan. */

#include "backend/model/pass_sizes.h"
#include "backend/plan/plan.h"
#include "third_party/bazel/test.h"

static sluice_ring_memo_t rings;

static sluice_plan_problem_t problem_of(int32_t num_experts, int32_t world_size) {
  const sluice_moe_config_t config = {.model_width = 4096,
                                      .hidden_width = 1536,
                                      .num_experts = num_experts,
                                      .top_k = 8,
                                      .dtype = SLUICE_DTYPE_BF16,
                                      .gated = SLUICE_GATED_HALVES,
                                      .activation = SLUICE_ACTIVATION_SILU,
                                      .restore_input = SLUICE_RESTORE_ADAPTIVE,
                                      .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE,
                                      .wgrad_mode = SLUICE_WGRAD_ADAPTIVE};
  sluice_plan_problem_t problem = {.header_bytes = sluice_headers_bytes(world_size), .rings = &rings};
  sluice_shape_init(&problem.shape, &config, NULL, 0, world_size, NULL, 0);
  return problem;
}

static sluice_plan_inputs_t inputs_of(uint64_t budget) {
  return (sluice_plan_inputs_t){.max_tokens = 8192,
                                .budget = budget,
                                .max_outstanding = 2,
                                .restore_input = SLUICE_RESTORE_ADAPTIVE,
                                .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE,
                                .wgrad_mode = SLUICE_WGRAD_ADAPTIVE};
}

/* Each rank makes its own plan, and all plans must be the same, so a plan must have the same cost on every rank. */
TEST(Plan_UnevenExperts_CostsTheSameOnEveryRank) {
  const int32_t first_position[] = {0, 1, 61, 64};
  const sluice_moe_config_t config = {
      .model_width = 512, .hidden_width = 2048, .num_experts = 64, .top_k = 2, .dtype = SLUICE_DTYPE_F32};
  double cost[3];
  for (int32_t rank = 0; rank < 3; ++rank) {
    sluice_plan_problem_t problem = {.rings = &rings};
    sluice_shape_init(&problem.shape, &config, NULL, rank, 3, first_position, 0);
    sluice_plan_data_t plan;
    memset(&plan, 0, sizeof plan);
    plan.inputs.max_tokens = 256, plan.num_chunks = 4, plan.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
    cost[rank] = sluice_plan_relative_time(&problem, &plan, NULL);
  }
  assert_true(cost[0] > 0 && cost[0] == cost[1] && cost[1] == cost[2]);
}

TEST(Plan_LargeLayerUnderBudget_FitsAndAddsUp) {
  const sluice_plan_problem_t problem = problem_of(1024, 256);
  const sluice_plan_inputs_t none = inputs_of(0);
  sluice_plan_data_t free, tight;
  assert_int_equal(sluice_plan_make(&problem, &none, NULL, NULL, NULL, &free), SLUICE_OK);
  uint64_t least = 0;
  assert_int_equal(sluice_plan_least_bytes(&problem, &none, &least), SLUICE_OK);
  assert_true(least < free.bytes.total);
  const sluice_plan_inputs_t budget = inputs_of(least);
  assert_int_equal(sluice_plan_make(&problem, &budget, NULL, NULL, NULL, &tight), SLUICE_OK);
  assert_true(tight.bytes.total <= least);
  const sluice_plan_bytes_t* b = &tight.bytes;
  assert_int_equal(b->total, b->base + b->slots + b->routing + b->schedules + b->headers + b->gemms + 2 * b->step);
  assert_int_equal(tight.worst_rows, (int64_t)256 * 8192 * 8);
}

static int free_rings(void** state) {
  (void)state;
  sluice_ring_memo_deinit(&rings);
  return 0;
}

int main(void) { return run_cases(NULL, free_rings); }
