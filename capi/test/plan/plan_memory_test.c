// SPDX-License-Identifier: Apache-2.0
/* Ownership of memory: a refused plan holds none, and a pass without gradients has no step. */

#include "capi/test/rig/own_rig.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

static void open_rig(rig_t* rig, uint64_t budget, int32_t max_outstanding) {
  const sluice_context_config_t context = own_rig_context(budget, max_outstanding);
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 0;
  own_rig_open(rig, &context, &config);
}

/* A refused forward holds no memory and makes no allocation, neither the first nor a later one. */
TEST(Budget_Refused_NothingWasAllocated) {
  rig_t rig;
  open_rig(&rig, 1 << 12, 1);
  const sluice_context_stats_t before = own_rig_stats(&rig);
  const int64_t calls = atomic_load(&rig.heap.calls), live = atomic_load(&rig.heap.live_bytes);
  for (int i = 0; i < 3; ++i) {
    sluice_step_t* step = (sluice_step_t*)(uintptr_t)1;
    REFUSED(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET, "no plan fits the memory budget of 4096 bytes");
    assert_null(step);
    const sluice_context_stats_t after = own_rig_stats(&rig);
    assert_memory_equal(&after, &before, sizeof after);
    assert_true(atomic_load(&rig.heap.calls) == calls && atomic_load(&rig.heap.live_bytes) == live);
  }
  own_rig_close(&rig);
}

/* From the smallest budget of a training step up: no step is created, no memory stays, and outputs have the same bits.
 * */
TEST(Budget_WithoutGradients_HoldsNoStep) {
  rig_t rig;
  sluice_step_t* step = NULL;
  open_rig(&rig, 1 << 20, 1);
  const uint64_t needs = own_rig_smallest_budget(&rig);
  own_rig_close(&rig);

  open_rig(&rig, needs, 1);
  float want[64];
  assert_true(rig.out.bytes <= sizeof want);
  WORKS(rig_forward(&rig, &step));
  memcpy(want, rig.out.tensor.data, rig.out.bytes);
  WORKS(rig_backward(&rig, step));
  sluice_step_drop(step);
  const uint64_t idle = own_rig_stats(&rig).current_bytes;
  for (int i = 0; i < 4; ++i) { /* more than max_outstanding */
    rig_reset(&rig);
    rig.forward.needs_backward = 0;
    WORKS(sluice_moe_forward(rig.moe, &rig.forward, NULL, NULL));
    assert_memory_equal(rig.out.tensor.data, want, rig.out.bytes);
    assert_int_equal(own_rig_stats(&rig).current_bytes, idle);
  }
  assert_true(own_rig_stats(&rig).peak_bytes <= needs);
  own_rig_close(&rig);
}

/* Passes with many tokens leave large slots. Under a plan for fewer tokens they shrink to the plan's bytes. */
TEST(UsePlan_AfterPassesWithoutOne_HoldsThePlansBytes) {
  rig_t rig;
  sluice_context_config_t context = own_rig_context(0, 0);
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 1;
  own_rig_open(&rig, &context, &config);
  rig.num_tokens = 4096;
  WORKS(rig_round(&rig, NULL));
  const uint64_t before = own_rig_stats(&rig).current_bytes;
  rig.num_tokens = 512;
  DEFAULTS(sluice_plan_config, wanted);
  wanted.max_tokens = rig.num_tokens, wanted.num_chunks = 2;
  sluice_plan_t* plan = NULL;
  WORKS(sluice_plan_create(rig.moe, &wanted, &plan));
  sluice_plan_info_t info = {.struct_size = sizeof info};
  WORKS(sluice_plan_get_info(plan, &info));
  WORKS(sluice_moe_use_plan(rig.moe, plan));
  WORKS(rig_round(&rig, NULL));
  WORKS(rig_round(&rig, NULL));
  const sluice_context_stats_t after = own_rig_stats(&rig);
  printf("without a plan %llu bytes, under it %llu of %llu\n", (unsigned long long)before,
         (unsigned long long)after.current_bytes, (unsigned long long)info.total_bytes);
  assert_true(after.current_bytes < before);
  assert_true(after.current_bytes <= info.total_bytes);
  WORKS(sluice_moe_use_plan(rig.moe, NULL));
  sluice_plan_destroy(plan);
  own_rig_close(&rig);
}
