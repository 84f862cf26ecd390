// SPDX-License-Identifier: Apache-2.0
/* The allocator's peak equals the bytes that a plan predicts from the counts, also if it keeps part of the chunks. */

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

/* ---- plans that keep part: if the budget lies between those of two policies, a plan keeps as many chunks as fit ----
 */

enum { TOKENS = 512, MOST_LINES = 512, STEPS = 24 };

static void open_pair(pair_t* p) {
  sluice_moe_config_t config = rig_config();
  config.model_width = 64, config.hidden_width = 256, config.num_chunks = 0;
  pair_open(p, &config);
}

typedef struct found_s {
  sluice_plan_info_t info;
  double best_whole; /* relative time of the fastest fitting policy that treats all chunks the same */
} found_t;

static found_t plan_for(const pair_t* p, uint64_t budget, int32_t input, int32_t pre_activation) {
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = TOKENS, config.memory_budget = budget, config.restore_input = input;
  config.restore_pre_activation = pre_activation;
  found_t found = {.best_whole = -1};
  sluice_plan_t* plan = own_rig_plan(&p->rig, &config, &found.info);
  sluice_plan_candidate_t lines[MOST_LINES];
  int32_t count = 0;
  WORKS(sluice_plan_candidates(plan, lines, MOST_LINES, &count));
  for (int32_t i = 0; i < count; ++i) {
    const sluice_plan_candidate_t* c = &lines[i];
    assert_true(c->kept_chunks >= 1 && c->kept_chunks <= c->num_chunks);
    int is_better = found.best_whole < 0 || c->relative_time < found.best_whole;
    if (c->fits && c->kept_chunks == c->num_chunks && is_better) found.best_whole = c->relative_time;
  }
  sluice_plan_destroy(plan);
  return found;
}

TEST(Plan_BetweenTwoPolicies_KeepsPartAndIsFasterThanAnyWhole) {
  pair_t p;
  open_pair(&p);
  const int32_t open = SLUICE_RESTORE_ADAPTIVE;
  const uint64_t least = plan_for(&p, 0, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE).info.total_bytes;
  const uint64_t most = plan_for(&p, 0, open, open).info.total_bytes;
  double last = 0;
  int32_t num_parts = 0;
  for (int i = 0; i <= STEPS; ++i) {
    const uint64_t budget = least + (most - least) * (uint64_t)i / STEPS;
    const found_t found = plan_for(&p, budget, open, open);
    const sluice_plan_info_t* info = &found.info;
    assert_true(info->total_bytes <= budget);
    assert_true(found.best_whole > 0 && info->relative_time <= found.best_whole);
    if (i > 0) assert_true(info->relative_time <= last); /* a larger budget is never slower */
    last = info->relative_time;
    if (info->kept_chunks == info->num_chunks) continue;
    ++num_parts;
    assert_true(info->relative_time < found.best_whole);
    assert_true(info->kept_rows > 0 && info->saved_bytes > 0);
    printf("budget %llu: %d of %d chunks T_DI %d, T_M %d, in %.3f of the time of the best policy of all chunks\n",
           (unsigned long long)budget, info->kept_chunks, info->num_chunks, info->restore_input,
           info->restore_pre_activation, info->relative_time / found.best_whole);
  }
  assert_true(num_parts > 0);
  pair_close(&p);
}

/* A requested policy applies to all chunks; if it does not fit, there is no plan. */
TEST(Plan_PolicyAskedFor_IsOfAllChunks) {
  pair_t p;
  open_pair(&p);
  DEFAULTS(sluice_plan_config, config);
  sluice_plan_info_t lean;
  config.max_tokens = TOKENS, config.num_chunks = 8, config.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  config.restore_input = SLUICE_RESTORE_REDISPATCH, config.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  sluice_plan_t* plan = own_rig_plan(&p.rig, &config, &lean);
  sluice_plan_destroy(plan);
  config.memory_budget = lean.total_bytes * 5 / 4;
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_KEEP;
  REFUSED(sluice_plan_create(p.rig.moe, &config, &plan), SLUICE_E_OVER_BUDGET, "or take the policy ");
  pair_close(&p);
}

TEST(Layer_KeepsPart_PredictedBytesAndSameResults) {
  budget_between_policies(&(budget_suite_t){.base = budget_base_case(), .run = world_run, .least_ranks = 1});
}
