// SPDX-License-Identifier: Apache-2.0
/* The memory that the plan of a layer leaves for layers of other shapes. */

#include "backend/model/pass_sizes.h"
#include "backend/plan/candidates.h"
#include "backend/plan/neighbours.h"
#include "third_party/bazel/test.h"

enum { TOKENS = 4096, STEPS = 4, ROOMY = 1 << 30 };

static sluice_ring_memo_t rings;

static sluice_plan_problem_t a_layer(int32_t hidden_width, int32_t top_k) {
  const sluice_moe_config_t config = {.model_width = 256,
                                      .hidden_width = hidden_width,
                                      .num_experts = 8,
                                      .top_k = top_k,
                                      .dtype = SLUICE_DTYPE_F32,
                                      .layer_id = hidden_width,
                                      .restore_input = SLUICE_RESTORE_ADAPTIVE,
                                      .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE,
                                      .wgrad_mode = SLUICE_WGRAD_ADAPTIVE};
  sluice_plan_problem_t problem = {.header_bytes = sluice_headers_bytes(4), .rings = &rings};
  sluice_shape_init(&problem.shape, &config, NULL, 0, 4, NULL, 0);
  return problem;
}

static uint64_t kind_of(const sluice_plan_problem_t* problem) {
  return (uint64_t)problem->shape.config.hidden_width << 8 | (uint64_t)problem->shape.config.top_k;
}

static sluice_status_t add(sluice_neighbours_t* neighbours, const sluice_plan_problem_t* problem) {
  return sluice_neighbours_add(neighbours, kind_of(problem), &problem->shape);
}

static sluice_plan_inputs_t inputs_of(const sluice_plan_problem_t* problem, int64_t max_tokens, uint64_t budget) {
  sluice_plan_inputs_t inputs = {.max_tokens = max_tokens, .budget = budget, .max_outstanding = STEPS};
  inputs.may_keep_part = 1;
  sluice_plan_inputs_take_shape(&inputs, &problem->shape);
  return inputs;
}

static sluice_plan_bytes_t bytes_beside(const sluice_neighbours_t* neighbours, const sluice_plan_problem_t* problem,
                                        int64_t max_tokens, uint64_t budget) {
  const sluice_plan_inputs_t inputs = inputs_of(problem, max_tokens, budget);
  sluice_plan_bytes_t bytes;
  assert_int_equal(sluice_neighbours_bytes(neighbours, kind_of(problem), problem, &inputs, &bytes), SLUICE_OK);
  return bytes;
}

static sluice_plan_set_t plans_of(sluice_plan_problem_t problem, const sluice_plan_bytes_t* beside, uint64_t budget) {
  const sluice_plan_inputs_t inputs = inputs_of(&problem, TOKENS, budget);
  sluice_plan_set_t set;
  problem.beside = beside;
  assert_int_equal(sluice_candidates_make(&problem, &inputs, NULL, 1, &set), SLUICE_OK);
  return set;
}

/* Layers with the same shape need no additional memory, since they can use the same plan. */
TEST(Neighbours_LayersAlike_WantNothing) {
  const sluice_plan_problem_t one = a_layer(512, 2);
  sluice_plan_problem_t two = one;
  sluice_neighbours_t neighbours = {0};
  two.shape.config.layer_id = 7;
  assert_int_equal(add(&neighbours, &one), SLUICE_OK);
  assert_int_equal(add(&neighbours, &two), SLUICE_OK);
  assert_int_equal(neighbours.count, 1);
  const sluice_plan_bytes_t bytes = bytes_beside(&neighbours, &two, TOKENS, ROOMY);
  assert_true(bytes.slots == 0 && bytes.step == 0);
  sluice_neighbours_deinit(&neighbours);
}

/* Counts the leanest plan until there is a plan for such batches, then that plan. Without a budget it counts nothing.
 */
TEST(Neighbours_AnotherShape_WantsItsLeastThenWhatItHas) {
  const sluice_plan_problem_t one = a_layer(512, 2), other = a_layer(1024, 4);
  sluice_neighbours_t neighbours = {0};
  assert_int_equal(add(&neighbours, &one), SLUICE_OK);
  assert_int_equal(add(&neighbours, &other), SLUICE_OK);
  const sluice_plan_bytes_t least = bytes_beside(&neighbours, &one, TOKENS, ROOMY);
  const sluice_plan_set_t roomy = plans_of(other, NULL, ROOMY);
  assert_true(least.slots > 0 && least.step > 0 && least.step < roomy.plans[0].bytes.step);
  assert_int_equal(bytes_beside(&neighbours, &one, TOKENS, 0).step, 0);

  sluice_neighbours_note(&neighbours, kind_of(&other), &other.shape, &roomy);
  assert_int_equal(bytes_beside(&neighbours, &one, TOKENS, ROOMY).step, roomy.plans[0].bytes.step);
  assert_int_equal(bytes_beside(&neighbours, &one, TOKENS, ROOMY).slots, roomy.plans[0].bytes.slots);
  const uint64_t larger = bytes_beside(&neighbours, &one, 2 * TOKENS, ROOMY).step; /* there is no plan for those */
  assert_true(larger > least.step && larger < 3 * least.step);
  sluice_neighbours_deinit(&neighbours);
}

/* Both plans fit the budget together, whichever is made first, and each counts the memory of the other. */
TEST(Neighbours_TwoPlans_FitOneBudget) {
  int num_unlike = 0;
  for (int order = 0; order < 2; ++order) {
    const sluice_plan_problem_t first = order == 0 ? a_layer(256, 4) : a_layer(2048, 1);
    const sluice_plan_problem_t second = order == 0 ? a_layer(2048, 1) : a_layer(256, 4);
    for (uint64_t budget = 64 << 20; budget < 1 << 30; budget += 16 << 20) {
      sluice_neighbours_t neighbours = {0};
      assert_int_equal(add(&neighbours, &first), SLUICE_OK);
      assert_int_equal(add(&neighbours, &second), SLUICE_OK);
      const sluice_plan_bytes_t wanted = bytes_beside(&neighbours, &first, TOKENS, budget);
      const uint64_t fixed = wanted.slots + wanted.routing + wanted.schedules + wanted.gemms;
      if (fixed + STEPS * wanted.step > budget / 4) { /* the budget may be too small for both */
        sluice_neighbours_deinit(&neighbours);
        continue;
      }
      const sluice_plan_set_t one = plans_of(first, &wanted, budget), alone = plans_of(first, NULL, budget);
      sluice_neighbours_note(&neighbours, kind_of(&first), &first.shape, &one);
      const sluice_plan_bytes_t taken = bytes_beside(&neighbours, &second, TOKENS, budget);
      const sluice_plan_set_t two = plans_of(second, &taken, budget);
      const sluice_plan_bytes_t *a = &one.plans[0].bytes, *b = &two.plans[0].bytes;
      const sluice_plan_bytes_t shared = sluice_plan_bytes_shared(a, b);
      const uint64_t step = a->step > b->step ? a->step : b->step;
      assert_true(shared.slots + shared.routing + shared.schedules + shared.gemms + STEPS * step <= budget);
      assert_true(b->slots >= a->slots && b->step >= a->step && b->total <= budget);
      num_unlike += alone.plans[0].kept_rows != one.plans[0].kept_rows;
      sluice_neighbours_deinit(&neighbours);
    }
  }
  assert_true(num_unlike > 0);
}
