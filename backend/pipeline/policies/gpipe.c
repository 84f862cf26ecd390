// SPDX-License-Identifier: Apache-2.0
/* GPipe: all forwards, then all backwards. Every micro-batch is in flight. */
#include "backend/pipeline/policies/policies.h"

static sluice_status_t check(const sluice_pipeline_spec_t* spec) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    SLUICE_TRY(
        SLUICE_REQUIRE(spec->in_flight[c] == 0 || spec->in_flight[c] >= spec->num_micro_batches,
                       "pipeline: gpipe has all %d micro-batches in flight, but in_flight[%d] is %d; set it to 0",
                       spec->num_micro_batches, c, spec->in_flight[c]));
  }
  return SLUICE_OK;
}

static void order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    for (int32_t i = 0; i < spec->num_micro_batches; ++i) sluice_order_add(out, SLUICE_STAGE_FORWARD, c, i);
  }
  for (int32_t k = spec->num_virtual - 1; k >= 0; --k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    for (int32_t i = 0; i < spec->num_micro_batches; ++i) sluice_order_add(out, SLUICE_STAGE_BACKWARD, c, i);
  }
}

const sluice_policy_t sluice_policy_gpipe = {
    .name = "gpipe",
    .source = "Huang et al., GPipe",
    .is_planned = 1,
    .placement = -1,
    .min_virtual = 1,
    .separate_wgrad = 0,
    .check = check,
    .order = order,
};
