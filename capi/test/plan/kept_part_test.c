// SPDX-License-Identifier: Apache-2.0
/* If the budget lies between those of two policies, a plan keeps as many chunks as fit. Its time is below that of the
 * fastest fitting policy of all chunks, and its bytes are as predicted. */

#include "capi/test/rig/own_rig.h"
#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

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
  sluice_plan_t* plan = NULL;
  WORKS(sluice_plan_create(p->rig.moe, &config, &plan));
  found_t found = {.info = {.struct_size = sizeof found.info}, .best_whole = -1};
  WORKS(sluice_plan_get_info(plan, &found.info));
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
  sluice_plan_t* plan = NULL;
  sluice_plan_info_t lean = {.struct_size = sizeof lean};
  config.max_tokens = TOKENS, config.num_chunks = 8, config.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  config.restore_input = SLUICE_RESTORE_REDISPATCH, config.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  WORKS(sluice_plan_create(p.rig.moe, &config, &plan));
  WORKS(sluice_plan_get_info(plan, &lean));
  sluice_plan_destroy(plan);
  config.memory_budget = lean.total_bytes * 5 / 4;
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_KEEP;
  REFUSED(sluice_plan_create(p.rig.moe, &config, &plan), SLUICE_E_OVER_BUDGET, "or take the policy ");
  pair_close(&p);
}

TEST(Layer_KeepsPart_PredictedBytesAndSameResults) {
  budget_between_policies(&(budget_suite_t){.base = budget_base_case(), .run = world_run, .least_ranks = 1});
}
