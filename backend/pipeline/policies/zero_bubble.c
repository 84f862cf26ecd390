// SPDX-License-Identifier: Apache-2.0
/* ZB-H1: 1F1B with weight gradients as separate ops. Stage s has p - s in flight before its first backward, and delays
 * its weight gradients by s micro-batches, so that every stage keeps at most p of both kinds, like the first stage of
 * 1F1B. Its bubble is (p - 1)(F + B - W), compared to (p - 1)(F + B + W) for 1F1B. */
#include "backend/base/math.h"
#include "backend/pipeline/policies/policies.h"

static int32_t wanted_in_flight(const sluice_pipeline_spec_t* spec, int32_t stage) {
  return (int32_t)sluice_min(spec->num_stages - stage, spec->num_micro_batches);
}

static sluice_status_t check(const sluice_pipeline_spec_t* spec) {
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    int32_t wants = wanted_in_flight(spec, s);
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->in_flight[s] == 0 || spec->in_flight[s] >= wants,
        "pipeline: zero_bubble has %d micro-batches in flight on stage %d, but in_flight is %d; set it to 0", wants, s,
        spec->in_flight[s]));
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->held[s] == 0 || spec->held[s] > s,
        "pipeline: zero_bubble holds %d micro-batches for weight gradients on stage %d, but held is %d; set it to 0",
        s + 1, s, spec->held[s]));
  }
  return SLUICE_OK;
}

static void order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int32_t ahead = wanted_in_flight(spec, stage) - 1, m = spec->num_micro_batches;
  int32_t late = (int32_t)sluice_min(stage, m);
  for (int32_t i = 0; i < ahead; ++i) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, i);
  for (int32_t i = 0; i < m; ++i) {
    if (ahead + i < m) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, ahead + i);
    sluice_order_add(out, SLUICE_STAGE_BACKWARD, stage, i);
    if (i >= late) sluice_order_add(out, SLUICE_STAGE_WEIGHT_GRAD, stage, i - late);
  }
  for (int32_t i = m - late; i < m; ++i) sluice_order_add(out, SLUICE_STAGE_WEIGHT_GRAD, stage, i);
}

const sluice_policy_t sluice_policy_zero_bubble = {
    .name = "zero_bubble",
    .source = "Qi et al., Zero Bubble Pipeline Parallelism, section 2.3 (ZB-H1)",
    .is_planned = 1,
    .placement = -1,
    .min_virtual = 1,
    .max_virtual = 1,
    .separate_wgrad = 1,
    .check = check,
    .order = order,
};
