// SPDX-License-Identifier: Apache-2.0
/* The allocator's peak equals the bytes that a plan predicts from the counts. */

#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

static uint32_t next_random(uint32_t* state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

TEST(Prediction_AnyShape_EqualsTheAllocatorOfEach) {
  uint32_t random = 11;
  for (int32_t i = 0; i < 8; ++i) {
    case_t c = world_small_case();
    c.model_width = 1 + next_random(&random) % 20, c.hidden_width = 1 + next_random(&random) % 30;
    c.num_experts = 6 + 6 * (i % 2), c.top_k = 1 + i % 4;
    for (int32_t r = 0; r < 3; ++r) c.tokens[r] = 1 + next_random(&random) % 90;
    budget_predictions(&(budget_suite_t){.base = c, .run = world_run, .least_ranks = 1});
  }
}

/* The peak may be lower by at most the memory that GEMMs may borrow. */
TEST(Prediction_NativeGemms_EqualsTheAllocatorButForTheirScratch) {
  case_t c = world_small_case();
  c.gemm = "native";
  budget_predictions(&(budget_suite_t){.base = c, .run = world_run, .least_ranks = 2});
}

/* Hosts may repeat an expert within a token, so that a rank gets more rows than distinct ids allow. More weight
 * gradients are pending and passes have more rows, but all bytes are planned. */
TEST(Prediction_RepeatedIds_EqualsTheAllocatorOfEach) {
  for (int32_t every = 1; every <= 2; ++every) {
    case_t c = world_small_case();
    c.num_experts = 12, c.top_k = 7, c.repeat_every = every; /* more routes than a rank has experts */
    for (int32_t r = 0; r < 4; ++r) c.tokens[r] = 30 - 5 * r;
    budget_predictions(&(budget_suite_t){.base = c, .run = world_run, .least_ranks = 2});
  }
}

/* Adapters add T_LOW, packed factors, and f32 sums of gradients in bf16. */
TEST(Prediction_Adapters_EqualsTheAllocatorOfEach) {
  case_t c = world_small_case();
  c.lora = WORLD_LORA_GATE | WORLD_LORA_JOINT | WORLD_LORA_DOWN, c.lora_rank = 5;
  budget_predictions(&(budget_suite_t){.base = c, .run = world_run, .least_ranks = 2});
}

static uint64_t planned_with_rank(int32_t rank) {
  case_t c = world_small_case();
  c.gated = 1, c.lora = WORLD_LORA_GATE | WORLD_LORA_JOINT | WORLD_LORA_DOWN, c.lora_rank = rank;
  DEFAULTS(sluice_plan_config, plan);
  plan.max_tokens = c.tokens[0], plan.max_outstanding = 1, plan.num_chunks = 1;
  c.plan = &plan;
  result_t got;
  world_run(&c, &got);
  must_work(&c, &got);
  assert_int_equal(got.peak_bytes[0], got.predicted_bytes[0]);
  world_free(&got);
  return got.planned_bytes[0];
}

/* Routing seldom fills a plan's slots, so the peak could hide missing bytes. This test computes them by hand. */
TEST(Plan_LargerRank_TakesTheBytesOfItsRowsAndFactors) {
  const uint64_t rows = 13 * 2 * 2 * 4 * sizeof(float); /* T_LOW of all routes, for a rank larger by four */
  const uint64_t factors = 2 * 12 * (1216 - 640);       /* of [2H, r] for each of 12 experts, in lines of 64 bytes */
  assert_int_equal(planned_with_rank(8) - planned_with_rank(4), rows + factors);
}
