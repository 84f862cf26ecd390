// SPDX-License-Identifier: Apache-2.0
#include "capi/test/plan/planner_rig.h"

#include <string.h>

#include "capi/test/rig/refusals.h"

const char planner_machine[] =
    "{\"sluice_machine\": 2, \"name\": \"test\", "
    "\"gemm\": {\"f32\": {\"flops_per_second\": 1e11, \"half_rows\": 8}}, "
    "\"rows\": {\"bytes_per_second\": 5e9}, \"activation_seconds\": 1e-10, \"activation_grad_seconds\": 2e-10, "
    "\"exchange\": {\"bytes_per_second\": 1.2e8, \"startup_seconds\": 1e-4, \"per_peer_seconds\": 2e-5}, "
    "\"host_copy\": {\"bytes_per_second\": 4e9}, \"op_seconds\": 2e-6, \"pass_seconds\": 1e-4}";

uint64_t planner_machine_length(void) { return strlen(planner_machine); }

sluice_planner_t* new_planner(void) {
  sluice_planner_t* planner = NULL;
  WORKS(sluice_planner_create(planner_machine, planner_machine_length(), &planner));
  return planner;
}

sluice_planner_workload_t new_workload(void) {
  DEFAULTS(sluice_planner_workload, w);
  w.model_width = 256, w.hidden_width = 1024, w.num_tokens = 2048;
  w.num_experts = 8, w.top_k = 2, w.world_size = 4;
  return w;
}

sluice_planner_prediction_t predict(const sluice_planner_t* planner, const sluice_planner_workload_t* workload,
                                    sluice_planner_choice_t choice) {
  sluice_planner_prediction_t out = {.struct_size = sizeof out};
  WORKS(sluice_planner_predict(planner, workload, &choice, &out, NULL, 0));
  return out;
}
