// SPDX-License-Identifier: Apache-2.0
#include "capi/test/cuda/fake_rigs.h"

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

sluice_moe_config_t config_under(int64_t capacity) {
  sluice_moe_config_t config = rig_config();
  config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = capacity;
  return config;
}

int64_t close_all(rig_t* rig) {
  char hazard[200], live[200];
  rig_close(rig);
  const int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  rig_use_machine(NULL, 0);
  return hazards;
}

void open_all(rig_t* rig, const sluice_moe_config_t* config) {
  fakes_open(1, 1);
  rig_use_machine(fakes_machine(), 0);
  if (rig_open(rig, NULL, config) != SLUICE_OK) fail_msg("%s", last_message());
}

sluice_plan_t* use_plan_in_its_bytes(rig_t* rig, sluice_plan_config_t* config, sluice_plan_info_t* info) {
  sluice_plan_destroy(own_rig_plan(rig, config, info));
  config->memory_budget = info->total_bytes;
  sluice_plan_t* plan = own_rig_plan(rig, config, info);
  assert_int_equal(info->total_bytes, info->base_bytes + info->slot_bytes + info->routing_bytes +
                                          (uint64_t)config->max_outstanding * info->step_bytes);
  assert_int_equal(sluice_moe_use_plan(rig->moe, plan), SLUICE_OK);
  return plan;
}

void run_planned(rig_t* rig, int32_t outstanding) {
  for (int round = 0; round < 3; ++round) {
    sluice_step_t* steps[4] = {NULL};
    for (int32_t s = 0; s < outstanding; ++s) {
      if (rig_forward(rig, &steps[s]) != SLUICE_OK) fail_msg("%s", last_message());
    }
    for (int32_t s = 0; s < outstanding; ++s) sluice_step_drop(steps[s]);
    if (rig_round(rig, NULL) != SLUICE_OK) fail_msg("%s", last_message());
  }
}

void close_planned(rig_t* rig, sluice_plan_t* plan, const sluice_plan_info_t* info) {
  assert_int_equal(own_rig_stats(rig).peak_bytes, info->total_bytes);
  sluice_plan_destroy(plan);
  assert_int_equal(close_all(rig), 0);
}
