// SPDX-License-Identifier: Apache-2.0
/* Plans of layers without an engine: a layer of 1,024 experts on 256 ranks, memory that the plan of a layer leaves for
 * layers of other shapes, plans for smaller batches within the bytes of the largest, and the cached rings that
 * determine the size of plans. */

#include "backend/model/pass_sizes.h"
#include "backend/plan/neighbours.h"
#include "backend/plan/plan_rings.h"
#include "backend/plan/plans_by_size.h"
#include "backend/schedule/template/template.h"
#include "third_party/bazel/test.h"

static sluice_ring_memo_t rings;

/* A layer that leaves n, policies and the weight-gradient mode open. */
static sluice_plan_problem_t open_layer(sluice_moe_config_t config, int32_t world_size) {
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  config.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  sluice_plan_problem_t problem = {.header_bytes = sluice_headers_bytes(world_size), .rings = &rings};
  sluice_shape_init(&problem.shape, &config, NULL, 0, world_size, NULL, 0);
  return problem;
}

static sluice_plan_inputs_t inputs_of(const sluice_plan_problem_t* problem, int64_t max_tokens, int32_t outstanding,
                                      uint64_t budget) {
  sluice_plan_inputs_t inputs = {
      .max_tokens = max_tokens, .budget = budget, .max_outstanding = outstanding, .may_keep_part = 1};
  sluice_plan_inputs_take_shape(&inputs, &problem->shape);
  return inputs;
}

/* ---- a large layer ---- */

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
  const sluice_plan_problem_t problem = open_layer((sluice_moe_config_t){.model_width = 4096,
                                                                         .hidden_width = 1536,
                                                                         .num_experts = 1024,
                                                                         .top_k = 8,
                                                                         .dtype = SLUICE_DTYPE_BF16,
                                                                         .gated = SLUICE_GATED_HALVES,
                                                                         .activation = SLUICE_ACTIVATION_SILU},
                                                   256);
  const sluice_plan_inputs_t none = inputs_of(&problem, 8192, 2, 0);
  sluice_plan_data_t free, tight;
  assert_int_equal(sluice_plan_make(&problem, &none, NULL, NULL, NULL, &free), SLUICE_OK);
  uint64_t least = 0;
  assert_int_equal(sluice_plan_least_bytes(&problem, &none, &least), SLUICE_OK);
  assert_true(least < free.bytes.total);
  const sluice_plan_inputs_t budget = inputs_of(&problem, 8192, 2, least);
  assert_int_equal(sluice_plan_make(&problem, &budget, NULL, NULL, NULL, &tight), SLUICE_OK);
  assert_true(tight.bytes.total <= least);
  const sluice_plan_bytes_t* b = &tight.bytes;
  assert_int_equal(b->total, b->base + b->slots + b->routing + b->schedules + b->headers + b->gemms + 2 * b->step);
  assert_int_equal(tight.worst_rows, (int64_t)256 * 8192 * 8);
}

/* ---- layers of other shapes ---- */

enum { TOKENS = 4096, STEPS = 4, ROOMY = 1 << 30 };

static sluice_plan_problem_t a_layer(int32_t hidden_width, int32_t top_k) {
  return open_layer((sluice_moe_config_t){.model_width = 256,
                                          .hidden_width = hidden_width,
                                          .num_experts = 8,
                                          .top_k = top_k,
                                          .dtype = SLUICE_DTYPE_F32,
                                          .layer_id = hidden_width},
                    4);
}

static uint64_t kind_of(const sluice_plan_problem_t* problem) {
  return (uint64_t)problem->shape.config.hidden_width << 8 | (uint64_t)problem->shape.config.top_k;
}

static sluice_status_t add(sluice_neighbours_t* neighbours, const sluice_plan_problem_t* problem) {
  return sluice_neighbours_add(neighbours, kind_of(problem), &problem->shape);
}

static sluice_plan_bytes_t bytes_beside(const sluice_neighbours_t* neighbours, const sluice_plan_problem_t* problem,
                                        int64_t max_tokens, uint64_t budget) {
  const sluice_plan_inputs_t inputs = inputs_of(problem, max_tokens, STEPS, budget);
  sluice_plan_bytes_t bytes;
  assert_int_equal(sluice_neighbours_bytes(neighbours, kind_of(problem), problem, &inputs, &bytes), SLUICE_OK);
  return bytes;
}

static sluice_plan_set_t plans_of(sluice_plan_problem_t problem, const sluice_plan_bytes_t* beside, uint64_t budget) {
  const sluice_plan_inputs_t inputs = inputs_of(&problem, TOKENS, STEPS, budget);
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

/* ---- smaller batches ---- */

enum { MOST_TOKENS = 8192, OUTSTANDING = 2 };

static sluice_plan_problem_t sized_layer(void) {
  return open_layer(
      (sluice_moe_config_t){
          .model_width = 512, .hidden_width = 2048, .num_experts = 8, .top_k = 2, .dtype = SLUICE_DTYPE_F32},
      4);
}

static sluice_plan_inputs_t inputs_of_sizes(const sluice_plan_problem_t* problem, uint64_t budget) {
  sluice_plan_inputs_t inputs = inputs_of(problem, MOST_TOKENS, OUTSTANDING, budget);
  inputs.base = 1 << 20;
  return inputs;
}

/* A budget between the leanest plan for the largest batches (share 0) and the plan that keeps one whole chunk (1). */
static uint64_t budget_of(const sluice_plan_problem_t* problem, double share) {
  sluice_plan_inputs_t inputs = inputs_of_sizes(problem, 0);
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
  const sluice_plan_inputs_t inputs = inputs_of_sizes(problem, budget);
  return plans_with(problem, &inputs);
}

/* Adds the plans of a size, and checks that existing plans do not change. */
static void add_size(sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem, int32_t size) {
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
                       b->base + b->slots + b->routing + b->schedules + b->headers + b->gemms + OUTSTANDING * b->step);
      assert_true(b->slots == shared->slots && b->routing == shared->routing && b->schedules == shared->schedules);
      assert_int_equal(set->plans[i].inputs.max_tokens, sluice_plan_size_tokens(MOST_TOKENS, size));
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
  const sluice_plan_problem_t problem = sized_layer();
  for (int32_t share = 0; share <= 10; ++share) {
    const uint64_t budget = budget_of(&problem, share / 10.0);
    sluice_plans_by_size_t* plans = plans_under(&problem, budget);
    for (int32_t i = 1; i < SLUICE_PLAN_SIZES; ++i) {
      const int32_t size = share % 2 ? i : SLUICE_PLAN_SIZES - i; /* in any order */
      add_size(plans, &problem, size);
      must_fit_beside(plans, budget);
    }
    sluice_plans_by_size_free(plans);
  }
}

/* With smaller batches the budget has space for policies that do not fit the largest batches, and with fewer chunks. */
TEST(TightBudget_SmallBatches_KeepRowsInFewerChunks) {
  const sluice_plan_problem_t problem = sized_layer();
  sluice_plans_by_size_t* plans = plans_under(&problem, budget_of(&problem, 0.1));
  for (int32_t size = 1; size < SLUICE_PLAN_SIZES; ++size) add_size(plans, &problem, size);
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
  const sluice_plan_problem_t problem = sized_layer();
  for (int32_t share = 1; share <= 9; share += 2) {
    sluice_plan_inputs_t inputs = inputs_of_sizes(&problem, budget_of(&problem, share / 10.0));
    inputs.restore_input = SLUICE_RESTORE_REDISPATCH, inputs.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
    sluice_plans_by_size_t* plans = plans_with(&problem, &inputs);
    assert_true(plans->of[0]->plans[0].bytes.total < inputs.budget);
    for (int32_t size = 1; size < SLUICE_PLAN_SIZES; ++size) add_size(plans, &problem, size);
    must_fit_beside(plans, inputs.budget);
    sluice_plans_by_size_free(plans);
  }
}

/* ---- rings: those of the templates, in any order of look-ups ---- */

enum { NUM_SPECS = SLUICE_RINGS_KNOWN + 60 };

/* Returns a different spec for each i. */
static sluice_template_spec_t spec_of(int32_t i) {
  sluice_template_spec_t spec = {.direction = i % 2 == 0 ? SLUICE_FORWARD : SLUICE_BACKWARD,
                                 .num_chunks = 1 + i / 8 % 10,
                                 .keep = i % 2 == 0,
                                 .bounded = 1,
                                 .gated = i / 2 % 2,
                                 .dgrad = i % 2,
                                 .wgrad = i % 2 == 0 ? SLUICE_WGRAD_CALL_NONE : SLUICE_WGRAD_CALL_NOW,
                                 .wgrad_mode = i / 4 % 2};
  for (int32_t c = 0; c < spec.num_chunks; ++c) {
    spec.restore_input[c] = i / 80 % 2 ? SLUICE_RESTORE_REDISPATCH : SLUICE_RESTORE_KEEP;
    spec.restore_pre_activation[c] = i / 160 ? SLUICE_RESTORE_RECOMPUTE : SLUICE_RESTORE_KEEP;
  }
  return spec;
}

static void check(sluice_ring_memo_t* memo, int32_t i) {
  const sluice_template_spec_t spec = spec_of(i);
  sluice_plan_rings_t got;
  sluice_template_t* built = NULL;
  assert_int_equal(sluice_ring_memo_get(memo, &spec, &got), SLUICE_OK);
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &built), SLUICE_OK);
  assert_memory_equal(&got.spec, &spec, sizeof spec);
  assert_memory_equal(got.ring, built->ring, sizeof got.ring);
  sluice_template_destroy(built, sluice_process_allocator());
}

TEST(Rings_OfMoreSpecsThanAreKept_AreThoseOfTheTemplates) {
  sluice_ring_memo_t memo = {0};
  const uint64_t before = sluice_process_allocator()->current_bytes;
  for (int round = 0; round < 2; ++round) {
    for (int32_t i = 0; i < NUM_SPECS; ++i) check(&memo, i);
  }
  assert_int_equal(memo.count, SLUICE_RINGS_KNOWN);
  sluice_ring_memo_deinit(&memo);
  assert_int_equal(sluice_process_allocator()->current_bytes, before);
}

TEST(Rings_OfASpecThatCannotBe_AreRefusedAndNotKept) {
  sluice_ring_memo_t memo = {0};
  sluice_template_spec_t spec = spec_of(0);
  sluice_plan_rings_t got;
  spec.num_chunks = 0;
  assert_int_equal(sluice_ring_memo_get(&memo, &spec, &got), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(memo.count, 0);
  sluice_ring_memo_deinit(&memo);
}

static int free_rings(void** state) {
  (void)state;
  sluice_ring_memo_deinit(&rings);
  return 0;
}

int main(void) { return run_cases(NULL, free_rings); }
