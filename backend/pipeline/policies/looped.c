// SPDX-License-Identifier: Apache-2.0
/* Interleaved 1F1B over looped virtual stages. Micro-batches are processed in groups of p: all of a group in one
 * virtual stage, then in the next one of the stage. Stage s runs 2(p - 1 - s) + (v - 1)p forwards ahead. */
#include "backend/base/math.h"
#include "backend/pipeline/policies/policies.h"

static sluice_status_t check(const sluice_pipeline_spec_t* spec) {
  SLUICE_TRY(
      SLUICE_REQUIRE(spec->num_micro_batches % spec->num_stages == 0,
                     "pipeline: policy looped needs num_micro_batches to be a multiple of num_stages = %d; it is %d",
                     spec->num_stages, spec->num_micro_batches));
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->in_flight[c] == 0,
        "pipeline: policy looped has a fixed number of micro-batches in flight; set in_flight[%d] to 0, found %d", c,
        spec->in_flight[c]));
  }
  return SLUICE_OK;
}

/* Adds the n-th forward or backward of a stage; backwards visit the virtual stages in reverse. */
static void add(const sluice_pipeline_spec_t* spec, int32_t stage, int32_t kind, int32_t n, sluice_stage_order_t* out) {
  int32_t p = spec->num_stages, v = spec->num_virtual;
  int32_t k = n % (p * v) / p;
  if (kind == SLUICE_STAGE_BACKWARD) k = v - 1 - k;
  sluice_order_add(out, kind, sluice_pipeline_virtual_stage(spec, stage, k), n / (p * v) * p + n % p);
}

static void order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int32_t p = spec->num_stages, v = spec->num_virtual, total = spec->num_micro_batches * v;
  int32_t ahead = (int32_t)sluice_min(2 * (p - 1 - stage) + (v - 1) * p, total);
  for (int32_t n = 0; n < ahead; ++n) add(spec, stage, SLUICE_STAGE_FORWARD, n, out);
  for (int32_t n = 0; n < total; ++n) {
    if (ahead + n < total) add(spec, stage, SLUICE_STAGE_FORWARD, ahead + n, out);
    add(spec, stage, SLUICE_STAGE_BACKWARD, n, out);
  }
}

const sluice_policy_t sluice_policy_looped = {
    .name = "looped",
    .source = "Narayanan et al., Megatron-LM, section 2.2.2",
    .is_planned = 1,
    .placement = SLUICE_PLACEMENT_LOOPED,
    .min_virtual = 2,
    .separate_wgrad = 0,
    .check = check,
    .order = order,
};
