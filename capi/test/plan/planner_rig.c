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

sluice_planner_t* planner;

int planner_open(void** state) {
  (void)state;
  return sluice_planner_create(planner_machine, strlen(planner_machine), &planner) == SLUICE_OK ? 0 : -1;
}

int planner_close(void** state) {
  (void)state;
  sluice_planner_destroy(planner);
  return 0;
}

sluice_planner_workload_t new_workload(void) {
  DEFAULTS(sluice_planner_workload, w);
  w.model_width = 256, w.hidden_width = 1024, w.num_tokens = 2048;
  w.num_experts = 8, w.top_k = 2, w.world_size = 4;
  return w;
}

sluice_planner_prediction_t predict(const sluice_planner_t* of, const sluice_planner_workload_t* workload,
                                    sluice_planner_choice_t choice) {
  sluice_planner_prediction_t out = {.struct_size = sizeof out};
  WORKS(sluice_planner_predict(of, workload, &choice, &out, NULL, 0));
  return out;
}

sluice_planner_candidate_t candidates[512];

int32_t choose(const sluice_planner_t* of, const sluice_planner_workload_t* workload,
               const sluice_planner_choice_t* wanted, int32_t* out_count) {
  int32_t chosen = -1;
  WORKS(sluice_planner_choose(of, workload, wanted, candidates, 512, out_count, &chosen));
  assert_true(chosen >= 0 && chosen < *out_count && candidates[chosen].verdict == SLUICE_PLANNER_CHOSEN);
  return chosen;
}
