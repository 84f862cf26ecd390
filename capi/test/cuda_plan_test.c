/* Budgets and plans on a CUDA context, on fakes: results, the device's memory under any routing, predictions, the one
 * read of a forward. plan_test.c is the same on a CPU. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/fakes.h"
#include "capi/test/rig.h"

static case_t base_case(void) {
  return (case_t){.world_size = 2,
                  .tokens = {96, 80, 96, 64},
                  .model_width = 12,
                  .hidden_width = 24,
                  .num_experts = 12,
                  .top_k = 2,
                  .dtype = SLUICE_DTYPE_F32,
                  .activation = SLUICE_ACTIVATION_GELU,
                  .bias = 1,
                  .wgrad_mode = SLUICE_WGRAD_ADAPTIVE,
                  .restore_input = SLUICE_RESTORE_ADAPTIVE,
                  .restore_middle = SLUICE_RESTORE_ADAPTIVE,
                  .reuse_saved = 1,
                  .outstanding = 1,
                  .hot_expert = -1,
                  .machine = fakes_machine()};
}

/* No hazard between any two accesses, and nothing left. */
static void run(const case_t* c, result_t* out) {
  char text[200], live[200];
  fakes_open(c->world_size, 1);
  world_run(c, out);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazard: %s", text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
}

static void must_work(const case_t* c, const result_t* got) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    if (got->status[r] != SLUICE_OK) {
      fail_msg("budget %llu, rank %d: %s", (unsigned long long)c->budget, r, got->message[r]);
    }
    if (c->budget > 0 && got->peak_bytes[r] > c->budget) {
      fail_msg("rank %d took %llu of %llu bytes", r, (unsigned long long)got->peak_bytes[r],
               (unsigned long long)c->budget);
    }
  }
}

/* The smallest budget that an error names; 0 when the case runs. */
static uint64_t smallest_budget(case_t c) {
  result_t got;
  run(&c, &got);
  unsigned long long least = 0;
  for (int32_t r = 0; r < c.world_size; ++r) {
    unsigned long long needs = 0;
    if (got.status[r] == SLUICE_OK) continue;
    assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
    const char* text = strstr(got.message[r], ") needs ");
    if (text == NULL || sscanf(text, ") needs %llu", &needs) != 1) fail_msg("no budget in: %s", got.message[r]);
    if (needs > least) least = needs;
  }
  world_free(&got);
  return least;
}

/* Within the budget, as the f64 reference, and with the bits that the same layer has without a budget. */
static void check(case_t c) {
  result_t got, want, plain;
  case_t whole = c;
  whole.budget = whole.host_budget = 0, whole.num_chunks = 1;
  run(&c, &got);
  must_work(&c, &got);
  run(&whole, &plain);
  must_work(&whole, &plain);
  world_reference(&c, &want);
  double d = world_distance(&c, &got, &want);
  if (!(d >= 0 && d <= 5e-6)) fail_msg("budget %llu: distance %g", (unsigned long long)c.budget, d);
  assert_true(world_identical(&c, &got, &plain, 0));
  world_free(&got);
  world_free(&want);
  world_free(&plain);
}

static void CudaBudget_FromTheSmallestUp_ResultsAreTheSame(void** state) {
  (void)state;
  for (int32_t w = 1; w <= 4; w += w) {
    for (int bits = 0; bits < 4; ++bits) {
      case_t c = base_case();
      c.world_size = w, c.gated = bits & 1, c.outstanding = bits & 1 ? 3 : 1, c.restore = bits >> 1;
      c.budget = 1;
      uint64_t least = smallest_budget(c);
      assert_true(least > 1);
      for (int i = 0; i < 3; i += 2) {
        c.budget = least + least * (uint64_t)i / 2;
        check(c);
      }
      c.budget = least - 1;
      assert_int_equal(smallest_budget(c), least);
    }
  }
}

/* All tokens of all ranks to one expert: memory stays within the plan, chunks become more, nothing is dropped. */
static void CudaBudget_OneHotExpert_StaysWithinThePlan(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 4; w += 2) {
    case_t c = base_case();
    c.world_size = w, c.top_k = 1, c.budget = 1;
    uint64_t least = smallest_budget(c);
    c.budget = least + least / 4;
    result_t balanced, hot;
    run(&c, &balanced);
    must_work(&c, &balanced);
    c.hot_expert = 1;
    check(c);
    run(&c, &hot);
    must_work(&c, &hot);
    assert_true(hot.num_chunks[0] > balanced.num_chunks[0]);
    world_free(&balanced);
    world_free(&hot);
  }
}

/* Few tokens, none on a rank, dropped routes, experts in another order, every policy. */
static void CudaBudget_OddShapesAndPolicies_ResultsAreTheSame(void** state) {
  (void)state;
  static const int32_t middle[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int i = 0; i < 9; ++i) {
    case_t c = base_case();
    c.restore_input = i % 3, c.restore_middle = middle[i / 3];
    c.uneven_owners = i % 2, c.drop_every = i % 4 == 1 ? 3 : 0;
    if (i % 3 == 1) c.tokens[0] = 5, c.tokens[1] = 0;
    c.hot_expert = i % 3 == 2 ? 2 : -1;
    c.budget = 1;
    c.budget = smallest_budget(c);
    c.budget += c.budget / 8;
    if (i % 2) c.host_budget = 1u << 20;
    check(c);
  }
}

/* Refused on all ranks alike before anything is sent. */
static void CudaBudget_MoreOutstandingThanSaid_RefusedByName(void** state) {
  (void)state;
  case_t c = base_case();
  c.top_k = 1, c.hot_expert = 1, c.outstanding = c.max_outstanding = 1;
  c.restore_input = c.restore_middle = SLUICE_RESTORE_KEEP;
  c.budget = 1;
  c.budget = smallest_budget(c);
  check(c);
  c.outstanding = 4;
  result_t got;
  run(&c, &got);
  for (int32_t r = 0; r < c.world_size; ++r) {
    assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
    assert_non_null(strstr(got.message[r], "max_outstanding is 1"));
  }
  world_free(&got);
}

/* Offloaded rows of one hot expert: what the pinned pool has no room for is sent and computed again. */
static void CudaHostBudget_OneHotExpert_ResultsAreTheSame(void** state) {
  (void)state;
  case_t c = base_case();
  c.top_k = 1, c.hot_expert = 1, c.outstanding = 2;
  c.restore_input = c.restore_middle = SLUICE_RESTORE_OFFLOAD;
  c.host_budget = 1000;
  result_t got;
  run(&c, &got);
  unsigned long long needs = 0;
  for (int32_t r = 0; r < c.world_size; ++r) {
    assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
    const char* text = strstr(got.message[r], "takes ");
    assert_non_null(strstr(got.message[r], "raise host_memory_budget to that"));
    assert_int_equal(sscanf(text, "takes %llu", &needs), 1);
  }
  world_free(&got);
  c.host_budget = needs;
  check(c);
  c.budget = 1u << 30; /* both at once */
  check(c);
}

/* One read in a forward, none in a backward: as without a plan. */
static void CudaBudget_HostWaits_AreOneInForwardNoneInBackward(void** state) {
  (void)state;
  for (int32_t w = 1; w <= 2; ++w) {
    case_t c = base_case();
    char live[200];
    result_t got;
    c.world_size = w, c.budget = 1;
    c.budget = 2 * smallest_budget(c);
    fakes_open(w, 1);
    world_run(&c, &got);
    must_work(&c, &got);
    for (int32_t r = 0; r < w; ++r) {
      assert_int_equal(fakes_waits(r, SLUICE_FORWARD).reads, 1);
      assert_int_equal(fakes_waits(r, SLUICE_BACKWARD).reads, 0);
    }
    if (w == 1) {
      assert_int_equal(fakes_waits(0, SLUICE_FORWARD).of_driver, 1);
      assert_int_equal(fakes_waits(0, SLUICE_BACKWARD).of_driver, 0);
    }
    assert_int_equal(fakes_close(live, sizeof live), 0);
    world_free(&got);
  }
}

/* ---- plan handles ---- */

enum { OUTSTANDING = 2, ROUNDS = 3 };

/* The device's high-water mark is what the plan says, to the byte: steps of a budget have blocks of its ceilings. */
static void CudaPlan_UnderABudget_PredictsThePeakToTheByte(void** state) {
  (void)state;
  static const int32_t middle[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  int checked = 0;
  for (int i = 0; i < 27; ++i) {
    rig_t rig;
    char live[200];
    const sluice_moe_config_t layer = rig_config();
    fakes_open(1, 1);
    rig_use_machine(fakes_machine(), 0);
    if (rig_open(&rig, NULL, &layer) != SLUICE_OK) fail_msg("%s", last_message());
    sluice_plan_config_t config;
    sluice_plan_config_init(&config, sizeof config);
    config.max_tokens = rig.tokens.tensor.shape[0], config.max_outstanding = OUTSTANDING;
    config.num_chunks = i / 9 + 1, config.restore_input = i % 3, config.restore_middle = middle[i / 3 % 3];
    sluice_plan_t* plan = NULL;
    sluice_plan_info_t info = {.struct_size = sizeof info};
    assert_int_equal(sluice_plan_create(rig.moe, &config, &plan), SLUICE_OK);
    assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
    sluice_plan_destroy(plan);
    config.memory_budget = info.total_bytes;
    assert_int_equal(sluice_plan_create(rig.moe, &config, &plan), SLUICE_OK);
    assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
    assert_int_equal(info.total_bytes,
                     info.base_bytes + info.slot_bytes + info.routing_bytes + OUTSTANDING * info.step_bytes);
    assert_int_equal(sluice_moe_use_plan(rig.moe, plan), SLUICE_OK);
    for (int round = 0; round < ROUNDS; ++round) {
      sluice_step_t* steps[OUTSTANDING] = {NULL};
      for (int s = 0; s < OUTSTANDING; ++s) {
        if (rig_forward(&rig, &steps[s]) != SLUICE_OK) fail_msg("%s", last_message());
      }
      for (int s = 0; s < OUTSTANDING; ++s) sluice_step_drop(steps[s]);
      if (rig_round(&rig, NULL) != SLUICE_OK) fail_msg("%s", last_message());
    }
    sluice_context_stats_t stats = {.struct_size = sizeof stats};
    assert_int_equal(sluice_context_get_stats(rig.context, 0, &stats), SLUICE_OK);
    if (stats.peak_bytes != info.total_bytes) {
      fail_msg("case %d: peak %llu, predicted %llu", i, (unsigned long long)stats.peak_bytes,
               (unsigned long long)info.total_bytes);
    }
    ++checked;
    sluice_plan_destroy(plan);
    rig_close(&rig);
    if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
    rig_use_machine(NULL, 0);
  }
  printf("predicted bytes equal the device allocator's peak in %d of %d cases\n", checked, checked);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaBudget_FromTheSmallestUp_ResultsAreTheSame),
      cmocka_unit_test(CudaBudget_OneHotExpert_StaysWithinThePlan),
      cmocka_unit_test(CudaBudget_OddShapesAndPolicies_ResultsAreTheSame),
      cmocka_unit_test(CudaBudget_MoreOutstandingThanSaid_RefusedByName),
      cmocka_unit_test(CudaHostBudget_OneHotExpert_ResultsAreTheSame),
      cmocka_unit_test(CudaBudget_HostWaits_AreOneInForwardNoneInBackward),
      cmocka_unit_test(CudaPlan_UnderABudget_PredictsThePeakToTheByte),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
