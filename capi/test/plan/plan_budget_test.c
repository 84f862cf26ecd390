// SPDX-License-Identifier: Apache-2.0
/* Layers under budgets from the smallest up: results equal those without a budget for any routing, in as many bytes. */
#include <stdatomic.h>

#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

static const budget_suite_t here = {.run = world_run};

/* All rows of all ranks go to one expert, K times each. */
TEST(Budget_RepeatedIds_ResultsAreTheSame) {
  for (int32_t w = 2; w <= 4; ++w) {
    for (int32_t i = 0; i < 6; ++i) {
      case_t c = budget_base_case();
      c.world_size = w, c.num_experts = w, c.top_k = 2; /* more routes than a rank has experts */
      c.repeat_every = 1 + i % 2, c.hot_expert = i % 4 < 2 ? 1 : -1;
      c.tokens[0] = c.tokens[2] = 64;
      c.wgrad_mode = i % 3 == 2 ? SLUICE_WGRAD_ADAPTIVE : i % 3;
      c.restore_input = i % 4 == 3 || i == 5 ? SLUICE_RESTORE_ADAPTIVE : i % 4;
      c.callback_experts = i == 5;
      const uint64_t least = budget_smallest(&here, c);
      for (uint64_t more = 0; more <= 2; more += 2) {
        c.budget = least + more * least / 2;
        budget_check(&here, c);
      }
    }
  }
}

/* ---- dgrad and wgrad separately ---- */

/* Opens a layer of one rank that keeps almost nothing, for one outstanding forward and separate dgrad and wgrad. */
static void open_lean(rig_t* rig, uint64_t budget) {
  sluice_context_config_t context = own_rig_context(budget, 1);
  context.separate_wgrad = 1;
  sluice_moe_config_t config = rig_config();
  config.restore_input = SLUICE_RESTORE_REDISPATCH, config.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  config.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  own_rig_open(rig, &context, &config);
}

static void halves(rig_t* rig, sluice_step_t* step, int32_t which) {
  rig->backward.parts = which;
  if (rig_backward(rig, step) != SLUICE_OK) fail_msg("half %d: %s", which, last_message());
}

/* The trace's memory does not count: a trace far larger than the budget changes nothing. */
TEST(Budget_Traced_RunsInTheSameBytes) {
  rig_t rig;
  open_lean(&rig, 1 << 20);
  const uint64_t needs = own_rig_smallest_budget(&rig);
  rig_close(&rig);
  open_lean(&rig, needs);
  assert_int_equal(sluice_context_trace(rig.context, 1 << 16), SLUICE_OK);
  assert_int_equal(rig_step(&rig), SLUICE_OK);
  sluice_trace_event_t event;
  int64_t count = 0;
  assert_int_equal(sluice_context_take_trace(rig.context, &event, 1, &count), SLUICE_OK);
  assert_int_equal(count, 1);
  assert_true(own_rig_stats(&rig).peak_bytes <= needs);
  rig_close(&rig);
}

/* More forwards than max_outstanding fit, since they keep little. A dgrad keeps rows for its wgrad: one that finds no
 * memory fails before any row is sent, and succeeds once a pending wgrad has run. */
TEST(Budget_MoreInputHalvesThanSaid_AreRefusedByName) {
  rig_t rig;
  enum { STEPS = 4 };
  sluice_step_t* steps[STEPS] = {NULL};
  open_lean(&rig, 1 << 20);
  const uint64_t needs = own_rig_smallest_budget(&rig);
  rig_close(&rig);
  open_lean(&rig, 1u << 30);
  uint64_t bytes[2];
  for (int i = 0; i < 2; ++i) {
    assert_int_equal(rig_forward(&rig, &steps[i]), SLUICE_OK);
    bytes[i] = own_rig_stats(&rig).current_bytes;
  }
  for (int i = 0; i < 2; ++i) sluice_step_drop(steps[i]);
  rig_close(&rig);

  const uint64_t budget = needs + (STEPS - 1) * (bytes[1] - bytes[0]); /* the plan and three more forwards */
  open_lean(&rig, budget);
  for (int i = 0; i < STEPS; ++i) {
    if (rig_forward(&rig, &steps[i]) != SLUICE_OK) fail_msg("%s", last_message());
  }
  rig.backward.parts = SLUICE_BACKWARD_DGRAD;
  int done = 0;
  sluice_status_t status = SLUICE_OK;
  while (done < STEPS && (status = rig_backward(&rig, steps[done])) == SLUICE_OK) ++done;
  assert_true(done > 0 && status == SLUICE_E_OVER_BUDGET);
  assert_non_null(strstr(last_message(), "dgrad alone would keep "));
  assert_non_null(strstr(last_message(), "(max_outstanding is 1): run wgrads or whole backwards first"));
  halves(&rig, steps[0], SLUICE_BACKWARD_WGRAD);
  halves(&rig, steps[done], SLUICE_BACKWARD_DGRAD);
  for (int i = 1; i <= done; ++i) halves(&rig, steps[i], SLUICE_BACKWARD_WGRAD);
  for (int i = 0; i < STEPS; ++i) sluice_step_drop(steps[i]);
  assert_true(own_rig_stats(&rig).peak_bytes <= budget);
  rig_close(&rig);
}

/* ---- chunks that no longer fit ---- */

static _Atomic int32_t num_warnings;
static char warning[512];

static void on_warning(void* user, int32_t level, const char* message) {
  (void)user;
  if (level != SLUICE_LOG_WARN || strstr(message, "sent and computed again in backward") == NULL) return;
  ++num_warnings;
  snprintf(warning, sizeof warning, "%s", message);
}

/* One hot expert gets more rows than can be kept: one rank logs this once per layer; every forward counts chunks. */
TEST(Budget_ChunksThatNoLongerFit_AreToldOnceAndCounted) {
  enum { FORWARDS = 3 };
  case_t c = budget_base_case();
  c.world_size = 3, c.num_experts = 24, c.top_k = 1, c.outstanding = FORWARDS;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_KEEP;
  c.budget = budget_smallest(&here, c);
  result_t even, hot;
  sluice_set_log(on_warning, NULL, SLUICE_LOG_WARN);
  world_run(&c, &even);
  must_work(&c, &even);
  assert_int_equal(num_warnings, 0);
  c.hot_expert = 1;
  world_run(&c, &hot);
  sluice_set_log(NULL, NULL, SLUICE_LOG_ERROR);
  must_work(&c, &hot);
  assert_int_equal(num_warnings, 1);
  assert_non_null(strstr(warning, "layer 7: a rank receives more rows than the budget keeps ("));
  for (int32_t r = 0; r < c.world_size; ++r) {
    assert_int_equal(even.fallback_chunks[r], 0);
    assert_true(hot.fallback_chunks[r] > 0 && hot.fallback_chunks[r] % FORWARDS == 0);
    assert_int_equal(hot.fallback_chunks[r], hot.fallback_chunks[0]);
  }
  world_free(&even);
  world_free(&hot);
}

int main(void) {
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(Budget_FromTheSmallestUp_ResultsAreTheSame, cpu_budget_suite(), budget_from_the_smallest_up),
      BUDGET_TEST(Budget_OneHotExpert_StaysWithinThePlan, cpu_budget_suite(), budget_one_hot_expert),
      BUDGET_TEST(Budget_OddShapesAndPolicies_ResultsAreTheSame, cpu_budget_suite(), budget_odd_shapes_and_policies),
      BUDGET_TEST(Budget_MoreOutstandingThanSaid_RefusedByName, cpu_budget_suite(), budget_more_outstanding_than_said),
      BUDGET_TEST(Budget_BatchesDiffer_ResultsAreTheSame, cpu_budget_suite(), budget_batches_differ),
      BUDGET_TEST(Budget_SeparateWgrad_AreCountedInThePlan, cpu_budget_suite(), budget_separate_wgrad),
      BUDGET_TEST(Budget_SeparateWgradUnsaid_AreRefusedByName, cpu_budget_suite(), budget_halves_unsaid),
  };
  return RUN_CASES_AFTER(rows);
}
