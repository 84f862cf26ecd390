// SPDX-License-Identifier: Apache-2.0
/* Layers with two levels under budgets and plans: memory stays within them for any routing, and results equal those
 * without a budget. */

#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

enum { RANKS = 4, PER_NODE = 2 };

/* Two nodes of two ranks; groups of other sizes have no nodes. */
static void run_on_nodes(const case_t* given, result_t* out) {
  case_t c = *given;
  c.ranks_per_node = c.world_size == RANKS ? PER_NODE : 0;
  world_run(&c, out);
}

static budget_suite_t suite_of(void) {
  budget_suite_t suite = {.base = budget_base_case(), .run = run_on_nodes, .least_ranks = RANKS};
  suite.base.world_size = RANKS, suite.base.top_k = 4, suite.base.deduplicate = SLUICE_DEDUPLICATE_NODES;
  return suite;
}

/* All tokens are on ranks of one local index, and most of their routes go to one node. The rank with this index in this
 * node forwards more rows than any rank receives. */
TEST(TwoLevelsBudget_OneRankPassesOnMost_StaysWithinThePlan) {
  const budget_suite_t suite = suite_of();
  const int32_t chunks[] = {1, 2, 3, 8};
  for (int32_t i = 0; i < 4; ++i) {
    case_t c = suite.base;
    c.num_experts = 4, c.top_k = 2, c.hot_expert = 3, c.num_chunks = chunks[i];
    c.tokens[1] = c.tokens[3] = 0;
    c.budget = 1;
    c.budget = budget_smallest(&suite, c);
    budget_check(&suite, c);
  }
}

TEST(TwoLevelsBudget_RepeatedIdsAndCallbacks_ResultsAreTheSame) {
  const budget_suite_t suite = suite_of();
  case_t c = suite.base;
  c.repeat_every = 3, c.budget = 1;
  c.budget = 2 * budget_smallest(&suite, c);
  budget_check(&suite, c);
  c = suite.base, c.callback_experts = 1, c.bias = 0;
  c.restore_input = SLUICE_RESTORE_REDISPATCH, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE, c.budget = 1;
  c.budget = budget_smallest(&suite, c);
  budget_check(&suite, c);
}

/* A plan that the host makes counts the most rows that a rank may forward. */
TEST(TwoLevelsPlan_OfTheHost_HoldsWhatItSays) {
  static const int32_t pre_activation[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int32_t i = 0; i < 9; ++i) {
    case_t c = suite_of().base;
    c.gated = i % 2, c.outstanding = 1 + i % 2, c.hot_expert = i % 4 == 3 ? 3 : -1;
    DEFAULTS(sluice_plan_config, plan);
    plan.max_tokens = 96, plan.max_outstanding = c.outstanding, plan.num_chunks = 1 + i % 4, plan.wgrad_mode = i % 2;
    plan.restore_input = i / 3, plan.restore_pre_activation = pre_activation[i % 3];
    c.plan = &plan;
    result_t got;
    run_on_nodes(&c, &got);
    must_work(&c, &got);
    for (int32_t r = 0; r < RANKS; ++r) {
      assert_true(got.peak_bytes[r] <= got.predicted_bytes[r]);
      assert_true(got.predicted_bytes[r] <= got.planned_bytes[r]);
    }
    world_free(&got);
  }
}

int main(void) {
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(TwoLevelsBudget_FromTheSmallestUp_ResultsAreTheSame, suite_of(), budget_from_the_smallest_up),
      BUDGET_TEST(TwoLevelsBudget_OneHotExpert_StaysWithinThePlan, suite_of(), budget_one_hot_expert),
      BUDGET_TEST(TwoLevelsBudget_OddShapesAndPolicies_ResultsAreTheSame, suite_of(), budget_odd_shapes_and_policies),
      BUDGET_TEST(TwoLevelsBudget_SeparateWgrad_ResultsAreTheSame, suite_of(), budget_separate_wgrad),
      BUDGET_TEST(TwoLevelsHostBudget_OneHotExpert_ResultsAreTheSame, suite_of(), host_budget_one_hot_expert),
  };
  return RUN_CASES_AFTER(rows);
}
