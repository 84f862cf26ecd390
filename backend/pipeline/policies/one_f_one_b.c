// SPDX-License-Identifier: Apache-2.0
/* 1F1B [PipeDream; Megatron-LM]: as a plan, and as a hint for a stage that runs whatever is ready [RRFP]. */
#include "backend/base/math.h"
#include "backend/pipeline/policies/policies.h"

/* Stage s has p - s in flight, or fewer if its limit or that of a stage before it is lower: a stage that waited for
 * more than the previous stage may send would wait forever. */
static int32_t in_flight(const sluice_pipeline_spec_t* spec, int32_t stage) {
  int64_t limit = spec->num_stages - stage;
  for (int32_t s = 0; s <= stage; ++s) {
    if (spec->in_flight[s] > 0) limit = sluice_min(limit, spec->in_flight[s]);
  }
  return (int32_t)sluice_min(limit, spec->num_micro_batches);
}

static void order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int32_t ahead = in_flight(spec, stage) - 1, m = spec->num_micro_batches;
  for (int32_t i = 0; i < ahead; ++i) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, i);
  for (int32_t i = 0; i < m; ++i) {
    if (ahead + i < m) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, ahead + i);
    sluice_order_add(out, SLUICE_STAGE_BACKWARD, stage, i);
  }
}

static int before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) { return a->place < b->place; }

const sluice_policy_t sluice_policy_1f1b = {
    .name = "1f1b",
    .source = "Narayanan et al., Megatron-LM, section 2.2.1",
    .is_planned = 1,
    .placement = -1,
    .min_virtual = 1,
    .max_virtual = 1,
    .separate_wgrad = 0,
    .order = order,
};

const sluice_policy_t sluice_policy_1f1b_hint = {
    .name = "1f1b_hint",
    .source = "RRFP, arXiv 2605.18750",
    .placement = -1,
    .min_virtual = 1,
    .max_virtual = 1,
    .separate_wgrad = 0,
    .order = order,
    .before = before,
};
