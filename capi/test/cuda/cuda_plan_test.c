// SPDX-License-Identifier: Apache-2.0
/* Budgets and plans on a CUDA context, on fakes: results, device memory under any routing, predictions, and the single
 * read of a forward. plan_test.c tests plans on the CPU. */
#include <math.h>

#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/rig.h"
#include "capi/test/world/budget_suite.h"
#include "third_party/bazel/test.h"

static budget_suite_t suite_of(void) {
  budget_suite_t suite = {.base = budget_base_case(), .run = run_on_fakes, .least_ranks = 1, .is_slow = 1};
  suite.base.model_width = 12, suite.base.hidden_width = 24;
  suite.base.machine = fakes_machine();
  return suite;
}

/* One read in a forward and none in a backward, as without a plan. */
TEST(CudaBudget_HostWaits_AreOneInForwardNoneInBackward) {
  for (int32_t w = 1; w <= 2; ++w) {
    const budget_suite_t suite = suite_of();
    case_t c = suite.base;
    result_t got;
    c.world_size = w, c.budget = 1;
    c.budget = 2 * budget_smallest(&suite, c);
    run_on_fakes(&c, &got);
    must_work(&c, &got);
    must_read(&c, 1, 0);
    world_free(&got);
  }
}

/* ---- plan handles ---- */

enum { OUTSTANDING = 2, ROUNDS = 3 };

/* Opens a layer on the fakes with a plan for case i of 27, under a budget of exactly the plan's bytes. */
static sluice_plan_t* open_planned(rig_t* rig, int i, int32_t separate_wgrad, sluice_plan_info_t* out_info) {
  static const int32_t pre_activation[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  const sluice_moe_config_t layer = rig_config();
  open_all(rig, &layer);
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = rig->tokens.tensor.shape[0], config.max_outstanding = OUTSTANDING;
  config.num_chunks = i / 9 + 1, config.restore_input = i % 3,
  config.restore_pre_activation = pre_activation[i / 3 % 3];
  config.separate_wgrad = separate_wgrad;
  return use_plan_in_its_bytes(rig, &config, out_info);
}

/* The device's peak memory equals the plan's bytes exactly: under a budget, steps allocate the plan's capacities. */
TEST(CudaPlan_UnderABudget_PredictsThePeakToTheByte) {
  int checked = 0;
  for (int i = 0; i < 27; ++i, ++checked) {
    rig_t rig;
    sluice_plan_info_t info;
    sluice_plan_t* plan = open_planned(&rig, i, 0, &info);
    run_planned(&rig, OUTSTANDING);
    close_planned(&rig, plan, &info);
  }
  printf("predicted bytes equal the device allocator's peak in %d of %d cases\n", checked, checked);
}

/* ---- dgrad and wgrad separately ---- */

static void half(rig_t* rig, sluice_step_t* step, int32_t which) {
  rig->backward.parts = which;
  if (rig_backward(rig, step) != SLUICE_OK) fail_msg("half %d: %s", which, last_message());
}

static void keep(const rig_tensor_t* t, float* into, int64_t* count) {
  memcpy(into + *count, t->tensor.data, t->bytes);
  *count += (int64_t)(t->bytes / sizeof(float));
}

/* All gradients of a step, after synchronizing the stream. */
static int64_t gradients_of(const rig_t* rig, float* out) {
  int64_t count = 0;
  fakes_machine()->settle(0);
  keep(&rig->grad_tokens, out, &count);
  keep(&rig->grad_weights, out, &count);
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    for (int32_t e = 0; e < rig->num_local; ++e) keep(&rig->grads[kind][e], out, &count);
  }
  return count;
}

/* All dgrads, then all wgrads, as in a zero-bubble pipeline. The peak still equals the plan's bytes exactly, gradients
 * equal those of whole backwards, and neither dgrad nor wgrad waits. */
TEST(CudaPlan_SeparateWgrad_PredictsThePeakAndGivesTheSameGradients) {
  enum { ROOM = 2048 };
  static float whole[ROOM], split[ROOM];
  int checked = 0;
  for (int i = 0; i < 27; ++i, ++checked) {
    rig_t rig;
    sluice_plan_info_t told, untold;
    sluice_step_t* steps[OUTSTANDING] = {NULL};
    sluice_plan_t* plan = open_planned(&rig, i, 0, &untold);
    assert_int_equal(rig_forward(&rig, &steps[0]), SLUICE_OK);
    assert_int_equal(rig_forward(&rig, &steps[1]), SLUICE_OK);
    half(&rig, steps[0], SLUICE_BACKWARD_BOTH);
    int64_t count = gradients_of(&rig, whole);
    assert_true(count > 500 && count <= ROOM);
    for (int s = 0; s < OUTSTANDING; ++s) sluice_step_drop(steps[s]);
    close_planned(&rig, plan, &untold);

    plan = open_planned(&rig, i, 1, &told);
    assert_true(told.step_bytes > untold.step_bytes);
    for (int round = 0; round < ROUNDS; ++round) {
      rig_reset(&rig);
      for (int s = 0; s < OUTSTANDING; ++s) {
        if (rig_forward(&rig, &steps[s]) != SLUICE_OK) fail_msg("%s", last_message());
      }
      int64_t waits = sluice_fake_cuda_host_waits();
      for (int s = 0; s < OUTSTANDING; ++s) half(&rig, steps[s], SLUICE_BACKWARD_DGRAD);
      for (int s = 0; s < OUTSTANDING; ++s) half(&rig, steps[s], SLUICE_BACKWARD_WGRAD);
      assert_int_equal(sluice_fake_cuda_host_waits(), waits);
      for (int s = 0; s < OUTSTANDING; ++s) sluice_step_drop(steps[s]);
      assert_int_equal(gradients_of(&rig, split), count);
      for (int64_t k = 0; k < count; ++k) {
        if (!(fabsf(split[k] - whole[k]) <= 1e-5f * (1 + fabsf(whole[k])))) {
          fail_msg("case %d: gradient %lld is %g, of a whole backward %g", i, (long long)k, split[k], whole[k]);
        }
      }
    }
    close_planned(&rig, plan, &told);
  }
  printf("dgrad and wgrad: predicted bytes equal the device allocator's peak in %d of %d cases\n", checked, checked);
}

int main(void) {
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(CudaBudget_FromTheSmallestUp_ResultsAreTheSame, suite_of(), budget_from_the_smallest_up),
      BUDGET_TEST(CudaBudget_OneHotExpert_StaysWithinThePlan, suite_of(), budget_one_hot_expert),
      BUDGET_TEST(CudaBudget_OddShapesAndPolicies_ResultsAreTheSame, suite_of(), budget_odd_shapes_and_policies),
      BUDGET_TEST(CudaBudget_MoreOutstandingThanSaid_RefusedByName, suite_of(), budget_more_outstanding_than_said),
      BUDGET_TEST(CudaBudget_BatchesDiffer_ResultsAreTheSame, suite_of(), budget_batches_differ),
      BUDGET_TEST(CudaHostBudget_OneHotExpert_ResultsAreTheSame, suite_of(), host_budget_one_hot_expert),
      BUDGET_TEST(CudaBudget_SeparateWgrad_AreCountedInThePlan, suite_of(), budget_separate_wgrad),
      BUDGET_TEST(CudaBudget_SeparateWgradUnsaid_AreRefusedByName, suite_of(), budget_halves_unsaid),
  };
  return RUN_CASES_AFTER(rows);
}
