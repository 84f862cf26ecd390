// SPDX-License-Identifier: Apache-2.0
/* Zero bubble with two virtual stages on each stage, placed in a V. The order is planned in steps of equal time, F = B
 * = W: in each step a stage runs a backward if one can run, else a forward, else a weight gradient. Among backwards it
 * prefers the one nearest to its end, among forwards the one nearest to its loss. A stage keeps 2p halves of a
 * micro-batch from forward to weight gradient, which are as many bytes as the first stage of 1F1B keeps. */
#include "backend/pipeline/policies/policies.h"

typedef struct counts_s {
  int32_t forward[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t backward[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t weight[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
} counts_t;

static sluice_status_t check(const sluice_pipeline_spec_t* spec) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->in_flight[c] == 0 && spec->held[c] == 0,
        "pipeline: policy v has fixed numbers of micro-batches in flight and held; set in_flight[%d] and held[%d] to 0",
        c, c));
  }
  return SLUICE_OK;
}

static int can_run_backward(const sluice_pipeline_spec_t* spec, const counts_t* now, int32_t c) {
  int32_t i = now->backward[c];
  if (i >= now->forward[c]) return 0;
  return c + 1 == sluice_pipeline_num_virtual_stages(spec) || now->backward[c + 1] > i;
}

static int can_run_forward(const sluice_pipeline_spec_t* spec, const counts_t* now, int32_t c) {
  int32_t i = now->forward[c];
  return i < spec->num_micro_batches && (c == 0 || now->forward[c - 1] > i);
}

/* Chooses what a stage does in a step, given the ops that ended before it. Returns 0 for nothing. */
static int choose(const sluice_pipeline_spec_t* spec, const counts_t* now, int32_t stage, sluice_stage_turn_t* out) {
  int32_t first = sluice_pipeline_virtual_stage(spec, stage, 0), second = sluice_pipeline_virtual_stage(spec, stage, 1);
  int32_t kept = now->forward[first] - now->weight[first] + now->forward[second] - now->weight[second];
  int32_t room = 2 * spec->num_stages - kept;
  if (can_run_backward(spec, now, first)) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_BACKWARD, first, now->backward[first]};
  } else if (can_run_backward(spec, now, second)) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_BACKWARD, second, now->backward[second]};
  } else if (room > 0 && can_run_forward(spec, now, second)) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_FORWARD, second, now->forward[second]};
  } else if (room > 1 && can_run_forward(spec, now, first)) {
    /* One slot stays free for the second, or nothing would ever end. */
    *out = (sluice_stage_turn_t){SLUICE_STAGE_FORWARD, first, now->forward[first]};
  } else if (now->weight[second] < now->backward[second]) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_WEIGHT_GRAD, second, now->weight[second]};
  } else if (now->weight[first] < now->backward[first]) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_WEIGHT_GRAD, first, now->weight[first]};
  } else {
    return 0;
  }
  return 1;
}

static void apply(counts_t* counts, sluice_stage_turn_t turn) {
  counts->forward[turn.virtual_stage] += turn.kind == SLUICE_STAGE_FORWARD;
  counts->backward[turn.virtual_stage] += turn.kind == SLUICE_STAGE_BACKWARD;
  counts->weight[turn.virtual_stage] += turn.kind == SLUICE_STAGE_WEIGHT_GRAD;
}

static void order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  counts_t before = {.forward = {0}}, after = before;
  for (int moves = 1; moves;) {
    moves = 0;
    for (int32_t s = 0; s < spec->num_stages; ++s) {
      sluice_stage_turn_t turn;
      if (!choose(spec, &before, s, &turn)) continue;
      if (s == stage) sluice_order_add(out, turn.kind, turn.virtual_stage, turn.micro_batch);
      apply(&after, turn);
      moves = 1;
    }
    before = after;
  }
}

const sluice_policy_t sluice_policy_v = {
    .name = "v",
    .source = "Qi et al., Pipeline Parallelism with Controllable Memory (V-Half, ZB-V); the order is our own",
    .is_planned = 1,
    .placement = SLUICE_PLACEMENT_V,
    .min_virtual = 2,
    .max_virtual = 2,
    .separate_wgrad = 1,
    .check = check,
    .order = order,
};
