// SPDX-License-Identifier: Apache-2.0
/* Graph mode under budgets and plans, on the fakes: the device's peak to the byte, and memory of a plan that a graph
 * keeps. capacity_test.c has the same budgets on a CPU. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/moe/context/context.h"
#include "backend/moe/run/choose_mode.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/rig.h"
#include "capi/test/world/capacity_budgets.h"

static budget_suite_t suite_of(void) {
  budget_suite_t suite = {.base = capacity_budget_base(), .run = run_on_fakes, .least_ranks = 1, .is_slow = 1};
  suite.base.hidden_width = 24, suite.base.model_width = 12;
  suite.base.machine = fakes_machine();
  return suite;
}

/* ---- capture under a plan -------------------------------------------------------------------------------------- */

static const int32_t POLICIES[][2] = {{SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP},
                                      {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD},
                                      {SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE}};

/* A layer under a capacity on the fakes, and a plan of two outstanding steps in force, whose bytes are the budget. */
static sluice_plan_t* open_planned(rig_t* rig, int policy, sluice_plan_info_t* out_info) {
  const sluice_moe_config_t layer = config_under(12);
  open_all(rig, &layer);
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = rig->num_tokens, config.max_outstanding = 2;
  config.restore_input = POLICIES[policy][0], config.restore_pre_activation = POLICIES[policy][1];
  return use_plan_in_its_bytes(rig, &config, out_info);
}

static void poison(const rig_t* rig) {
  memset(rig->out.memory, 0xff, rig->out.bytes);
  memset(rig->grad_tokens.memory, 0xff, rig->grad_tokens.bytes);
}

static int is_same(const rig_t* rig, const void* out, const void* grad) {
  return memcmp(rig->out.memory, out, rig->out.bytes) == 0 &&
         memcmp(rig->grad_tokens.memory, grad, rig->grad_tokens.bytes) == 0;
}

/* Captures a forward and its backward, whose step is dropped. */
static sluice_fake_graph_t* capture_round(rig_t* rig) {
  sluice_fake_graph_t* graph = NULL;
  sluice_step_t* step = NULL;
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  if (rig_forward(rig, &step) != SLUICE_OK) fail_msg("%s", last_message());
  if (rig_backward(rig, step) != SLUICE_OK) fail_msg("%s", last_message());
  sluice_step_drop(step);
  assert_int_equal(sluice_fake_cuda_end_capture(fakes_stream(0), &graph), 0);
  return graph;
}

/* A call that a capture refuses does not invalidate the capture. */
static void first_call_in_a_capture_is_refused(rig_t* rig) {
  sluice_fake_graph_t* graph = NULL;
  sluice_step_t* step = NULL;
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(rig_forward(rig, &step), SLUICE_E_STATE, "this forward has not run outside of a capture yet");
  assert_int_equal(sluice_fake_cuda_end_capture(fakes_stream(0), &graph), 0);
  sluice_fake_cuda_destroy_graph(graph);
}

/* The graph's step remains one of the plan's two, even when it is dropped: one more fits, another is refused by name
 * before any work is enqueued, and the device's peak stays as planned. */
TEST(CudaGraph_UnderABudget_ReplaysAndItsStepStaysCounted) {
  for (int policy = 0; policy < 3; ++policy) {
    rig_t rig;
    sluice_plan_info_t info;
    sluice_step_t *step = NULL, *other = NULL;
    sluice_plan_t* plan = open_planned(&rig, policy, &info);
    assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
    fakes_machine()->settle(0);
    void *out = malloc(rig.out.bytes), *grad = malloc(rig.grad_tokens.bytes);
    memcpy(out, rig.out.memory, rig.out.bytes), memcpy(grad, rig.grad_tokens.memory, rig.grad_tokens.bytes);
    sluice_fake_graph_t* graph = capture_round(&rig);
    for (int launch = 0; launch < 3; ++launch) {
      poison(&rig);
      sluice_fake_cuda_launch_graph(graph, fakes_stream(0));
      fakes_machine()->settle(0);
      assert_true(is_same(&rig, out, grad));
    }
    for (int round = 0; round < 3; ++round) {
      if (rig_forward(&rig, &step) != SLUICE_OK) fail_msg("policy %d: %s", policy, last_message());
      sluice_status_t status = rig_forward(&rig, &other);
      if (info.step_bytes > 0) {
        assert_int_equal(status, SLUICE_E_OVER_BUDGET);
        assert_non_null(strstr(last_message(), "max_outstanding is 2"));
      }
      if (status == SLUICE_OK) sluice_step_drop(other);
      sluice_fake_cuda_launch_graph(graph, fakes_stream(0)); /* while the other step is outstanding */
      poison(&rig);
      assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
      sluice_step_drop(step);
      fakes_machine()->settle(0);
      assert_memory_equal(rig.grad_tokens.memory, grad, rig.grad_tokens.bytes);
    }
    sluice_fake_cuda_destroy_graph(graph);
    free(out), free(grad);
    close_planned(&rig, plan, &info);
  }
}

/* Under the context's own budget there is no plan before the first call, which must be made outside of a capture. */
TEST(CudaGraph_BudgetWithoutAPlanYet_IsRefusedByName) {
  rig_t rig;
  const sluice_moe_config_t layer = config_under(12);
  open_all(&rig, &layer);
  rig.context->memory_budget = (uint64_t)1 << 30;
  sluice_layer_choose_mode(rig.moe);
  first_call_in_a_capture_is_refused(&rig);
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  sluice_fake_cuda_destroy_graph(capture_round(&rig));
  close_planned(&rig, NULL, NULL);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1); /* slots are NaN at the start of each pass: padding must be written */
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(CudaCapacityBudget_FromTheSmallestUp_PeakIsPlannedToTheByte, suite_of(),
                  capacity_budget_peak_is_planned),
      BUDGET_TEST(CudaCapacityBudget_MoreOutstandingThanSaid_RefusedOnAllRanks, suite_of(),
                  capacity_budget_more_outstanding_than_said),
  };
  return RUN_CASES_AFTER(rows);
}
