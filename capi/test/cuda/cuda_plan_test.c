// SPDX-License-Identifier: Apache-2.0
/* Budgets and plans on a CUDA context, on fakes: results, device memory under any routing, predictions. plan_test.c
 * tests plans on the CPU. */
#include <stdlib.h>

#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/rig.h"
#include "capi/test/world/budget_suite.h"
#include "third_party/bazel/test.h"

static budget_suite_t suite_of(case_t base) {
  budget_suite_t suite = {.base = base, .run = run_on_fakes, .least_ranks = 1, .is_slow = 1};
  suite.base.model_width = 12, suite.base.hidden_width = 24;
  suite.base.machine = fakes_machine();
  return suite;
}

/* ---- plan handles ---- */

enum { OUTSTANDING = 2, POLICIES = 9, CASES = 3 * POLICIES };
enum { WHOLE, HALVES, CALLBACKS, KINDS }; /* of backwards and experts */

/* Opens a layer on the fakes with a plan for case i, under a budget of exactly the plan's bytes. */
static sluice_plan_t* open_planned(rig_t* rig, int i, int kind, sluice_plan_info_t* out_info) {
  sluice_moe_config_t layer = rig_config();
  DEFAULTS(sluice_plan_config, config);
  config.num_chunks = i / POLICIES + 1, config.restore_input = i % 3;
  config.restore_pre_activation = world_pre_activations[i / 3 % 3];
  config.separate_wgrad = kind == HALVES;
  layer.callback_experts = kind == CALLBACKS;
  if (kind == CALLBACKS) { /* a plan cannot change their policies */
    layer.restore_input = config.restore_input, layer.restore_pre_activation = config.restore_pre_activation;
  }
  open_all(rig, &layer);
  config.max_tokens = rig->num_tokens, config.max_outstanding = OUTSTANDING;
  return use_plan_in_its_bytes(rig, &config, out_info);
}

/* Rounds of all dgrads, then all wgrads, as in a zero-bubble pipeline. Neither waits. */
static void run_halves(rig_t* rig) {
  for (int round = 0; round < 3; ++round) {
    sluice_step_t* steps[OUTSTANDING] = {NULL};
    for (int s = 0; s < OUTSTANDING; ++s) {
      if (rig_forward(rig, &steps[s]) != SLUICE_OK) fail_msg("%s", last_message());
    }
    const int64_t waits = sluice_fake_cuda_host_waits();
    for (int i = 0; i < 2 * OUTSTANDING; ++i) {
      rig->backward.parts = i < OUTSTANDING ? SLUICE_BACKWARD_DGRAD : SLUICE_BACKWARD_WGRAD;
      if (rig_backward(rig, steps[i % OUTSTANDING]) != SLUICE_OK) fail_msg("half %d: %s", i, last_message());
    }
    assert_int_equal(sluice_fake_cuda_host_waits(), waits);
    for (int s = 0; s < OUTSTANDING; ++s) sluice_step_drop(steps[s]);
  }
}

/* The device's peak memory equals the plan's bytes exactly: under a budget, steps allocate the plan's capacities. */
TEST(CudaPlan_UnderABudget_PredictsThePeakToTheByte) {
  for (int i = 0; i < KINDS * CASES; ++i) {
    rig_t rig;
    sluice_plan_info_t info;
    const int kind = i / CASES, is_kept = i % POLICIES == 0,
              is_recomputed = world_pre_activations[i / 3 % 3] == SLUICE_RESTORE_RECOMPUTE;
    if (kind == CALLBACKS && !is_kept && !is_recomputed) continue; /* refused */
    sluice_plan_t* plan = open_planned(&rig, i % CASES, kind, &info);
    (kind == HALVES ? run_halves(&rig) : run_planned(&rig, OUTSTANDING));
    close_planned(&rig, plan, &info);
  }
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* slots are NaN at the start of each pass, so padding must be written */
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(CudaBudget_FromTheSmallestUp_ResultsAreTheSame, suite_of(budget_base_case()),
                  budget_from_the_smallest_up),
      BUDGET_TEST(CudaBudget_OneHotExpert_StaysWithinThePlan, suite_of(budget_base_case()), budget_one_hot_expert),
      BUDGET_TEST(CudaBudget_OddShapesAndPolicies_ResultsAreTheSame, suite_of(budget_base_case()),
                  budget_odd_shapes_and_policies),
      BUDGET_TEST(CudaBudget_MoreOutstandingThanSaid_RefusedByName, suite_of(budget_base_case()),
                  budget_more_outstanding_than_said),
      BUDGET_TEST(CudaBudget_BatchesDiffer_ResultsAreTheSame, suite_of(budget_base_case()), budget_batches_differ),
      BUDGET_TEST(CudaHostBudget_OneHotExpert_ResultsAreTheSame, suite_of(budget_base_case()),
                  host_budget_one_hot_expert),
      BUDGET_TEST(CudaBudget_SeparateWgrad_AreCountedInThePlan, suite_of(budget_base_case()), budget_separate_wgrad),
      BUDGET_TEST(CudaBudget_SeparateWgradUnsaid_AreRefusedByName, suite_of(budget_base_case()), budget_halves_unsaid),
      BUDGET_TEST(CudaCapacityBudget_FromTheSmallestUp_PeakIsPlannedToTheByte, suite_of(capacity_budget_base()),
                  capacity_budget_peak_is_planned),
      BUDGET_TEST(CudaCapacityBudget_MoreOutstandingThanSaid_RefusedOnAllRanks, suite_of(capacity_budget_base()),
                  capacity_budget_more_outstanding_than_said),
  };
  return RUN_CASES_AFTER(rows);
}
