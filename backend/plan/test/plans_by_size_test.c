// SPDX-License-Identifier: Apache-2.0
/* Plans for smaller batches fit into the bytes that the plans for the largest batches have reserved. */

#include "backend/model/pass_sizes.h"
#include "backend/plan/plans_by_size.h"
#include "third_party/bazel/test.h"

#define TOKENS 8192
#define STEPS  2

static sluice_ring_memo_t rings;

static sluice_plan_problem_t a_layer(void) {
  const sluice_moe_config_t config = {.model_width = 512,
                                      .hidden_width = 2048,
                                      .num_experts = 8,
                                      .top_k = 2,
                                      .dtype = SLUICE_DTYPE_F32,
                                      .restore_input = SLUICE_RESTORE_ADAPTIVE,
                                      .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE,
                                      .wgrad_mode = SLUICE_WGRAD_ADAPTIVE};
  sluice_plan_problem_t problem = {.header_bytes = sluice_headers_bytes(4), .rings = &rings};
  sluice_shape_init(&problem.shape, &config, NULL, 0, 4, NULL, 0);
  return problem;
}

static sluice_plan_inputs_t inputs_of(uint64_t budget) {
  return (sluice_plan_inputs_t){.max_tokens = TOKENS,
                                .budget = budget,
                                .base = 1 << 20,
                                .max_outstanding = STEPS,
                                .restore_input = SLUICE_RESTORE_ADAPTIVE,
                                .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE,
                                .may_keep_part = 1,
                                .wgrad_mode = SLUICE_WGRAD_ADAPTIVE};
}

/* A budget between the leanest plan for the largest batches (share 0) and the plan that keeps one whole chunk (1). */
static uint64_t budget_of(const sluice_plan_problem_t* problem, double share) {
  sluice_plan_inputs_t inputs = inputs_of(0);
  uint64_t least = 0, most = 0;
  assert_int_equal(sluice_plan_least_bytes(problem, &inputs, &least), SLUICE_OK);
  inputs.num_chunks = 1, inputs.restore_input = SLUICE_RESTORE_KEEP,
  inputs.restore_pre_activation = SLUICE_RESTORE_KEEP;
  assert_int_equal(sluice_plan_least_bytes(problem, &inputs, &most), SLUICE_OK);
  return least + (uint64_t)(share * (double)(most - least));
}

static sluice_plans_by_size_t* plans_with(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs) {
  sluice_plans_by_size_t* plans = NULL;
  assert_int_equal(sluice_plans_by_size_begin(&plans), SLUICE_OK);
  assert_int_equal(sluice_candidates_make(problem, inputs, NULL, SLUICE_PLAN_CANDIDATES, plans->of[0]), SLUICE_OK);
  return plans;
}

static sluice_plans_by_size_t* plans_under(const sluice_plan_problem_t* problem, uint64_t budget) {
  const sluice_plan_inputs_t inputs = inputs_of(budget);
  return plans_with(problem, &inputs);
}

/* Adds the plans of a size, and checks that existing plans do not change. */
static void add(sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem, int32_t size) {
  const sluice_plan_set_t before = *plans->of[0];
  assert_int_equal(sluice_plans_by_size_add(plans, problem, NULL, SLUICE_PLAN_CANDIDATES, size), SLUICE_OK);
  assert_memory_equal(plans->of[0], &before, sizeof before);
  assert_true(plans->of[size]->count > 0); /* at least n and policies of the largest size */
}

/* The bytes of every plan add up, fit the budget, and include those of the largest plan, so that steps may mix. */
static void must_fit_beside(const sluice_plans_by_size_t* plans, uint64_t budget) {
  const sluice_plan_bytes_t* shared = &plans->of[0]->plans[0].bytes;
  for (int32_t size = 0; size < SLUICE_PLAN_SIZES; ++size) {
    const sluice_plan_set_t* set = plans->of[size];
    for (int32_t i = 0; set != NULL && i < set->count; ++i) {
      const sluice_plan_bytes_t* b = &set->plans[i].bytes;
      assert_true(b->total <= budget);
      assert_int_equal(b->total,
                       b->base + b->slots + b->routing + b->schedules + b->headers + b->gemms + STEPS * b->step);
      assert_true(b->slots == shared->slots && b->routing == shared->routing && b->schedules == shared->schedules);
      assert_int_equal(set->plans[i].inputs.max_tokens, sluice_plan_size_tokens(TOKENS, size));
    }
  }
}

TEST(Size_OfABatch_IsThatOfTheFewestTokensThatHoldIt) {
  assert_int_equal(sluice_plan_size(8192, 8192), 0);
  assert_int_equal(sluice_plan_size(8192, 4097), 0);
  assert_int_equal(sluice_plan_size(8192, 4096), 1);
  assert_int_equal(sluice_plan_size(8192, 64), 7);
  assert_int_equal(sluice_plan_size(8192, 0), 7);
  assert_int_equal(sluice_plan_size(5, 3), 1);
  assert_int_equal(sluice_plan_size(5, 2), 2);
  assert_int_equal(sluice_plan_size(5, 1), 3); /* no smaller size has fewer tokens */
  assert_int_equal(sluice_plan_size(1, 0), 0);
  for (int64_t most = 1; most < 300; ++most) {
    for (int64_t tokens = 0; tokens <= most; ++tokens) {
      assert_true(sluice_plan_size_tokens(most, sluice_plan_size(most, tokens)) >= tokens);
    }
  }
}

TEST(Budgets_EverySize_FitsBesideTheOthers) {
  const sluice_plan_problem_t problem = a_layer();
  for (int32_t share = 0; share <= 10; ++share) {
    const uint64_t budget = budget_of(&problem, share / 10.0);
    sluice_plans_by_size_t* plans = plans_under(&problem, budget);
    for (int32_t i = 1; i < SLUICE_PLAN_SIZES; ++i) {
      const int32_t size = share % 2 ? i : SLUICE_PLAN_SIZES - i; /* in any order */
      add(plans, &problem, size);
      must_fit_beside(plans, budget);
    }
    sluice_plans_by_size_free(plans);
  }
}

/* With smaller batches the budget has space for policies that do not fit the largest batches, and with fewer chunks. */
TEST(TightBudget_SmallBatches_KeepRowsInFewerChunks) {
  const sluice_plan_problem_t problem = a_layer();
  sluice_plans_by_size_t* plans = plans_under(&problem, budget_of(&problem, 0.1));
  for (int32_t size = 1; size < SLUICE_PLAN_SIZES; ++size) add(plans, &problem, size);
  const sluice_plan_data_t *large = &plans->of[0]->plans[0], *small = &plans->of[SLUICE_PLAN_SIZES - 1]->plans[0];
  for (int32_t size = 0; size < SLUICE_PLAN_SIZES; ++size) {
    const sluice_plan_data_t* plan = &plans->of[size]->plans[0];
    printf("%5lld tokens: n %d, T_DI %d, T_M %d, %d chunks kept\n", (long long)plan->inputs.max_tokens,
           plan->num_chunks, plan->restore_input, plan->restore_pre_activation, plan->kept_chunks);
  }
  assert_true(large->restore_input != SLUICE_RESTORE_KEEP || large->restore_pre_activation != SLUICE_RESTORE_KEEP ||
              large->kept_chunks < large->num_chunks);
  assert_true(small->restore_input == SLUICE_RESTORE_KEEP && small->restore_pre_activation == SLUICE_RESTORE_KEEP);
  assert_int_equal(small->kept_chunks, small->num_chunks);
  assert_true(small->num_chunks < large->num_chunks);
  sluice_plans_by_size_free(plans);
}

/* If nothing is stored, the largest batches leave a part of the budget. Slots of smaller batches do not use it, since
 * other layers of the context may need it. */
TEST(Spare_SmallBatches_TakeNoMoreSlots) {
  const sluice_plan_problem_t problem = a_layer();
  for (int32_t share = 1; share <= 9; share += 2) {
    sluice_plan_inputs_t inputs = inputs_of(budget_of(&problem, share / 10.0));
    inputs.restore_input = SLUICE_RESTORE_REDISPATCH, inputs.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
    sluice_plans_by_size_t* plans = plans_with(&problem, &inputs);
    assert_true(plans->of[0]->plans[0].bytes.total < inputs.budget);
    for (int32_t size = 1; size < SLUICE_PLAN_SIZES; ++size) add(plans, &problem, size);
    must_fit_beside(plans, inputs.budget);
    sluice_plans_by_size_free(plans);
  }
}

static int free_rings(void** state) {
  (void)state;
  sluice_ring_memo_deinit(&rings);
  return 0;
}

int main(void) { return run_cases(NULL, free_rings); }
