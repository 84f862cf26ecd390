// SPDX-License-Identifier: Apache-2.0
/* DeepSpeed's TrainSchedule: 1F1B whose instructions run one after the other. A send or receive blocks the stage, so no
 * message overlaps with computation. This policy exists for comparison; Sluice never runs it. */
#include "backend/pipeline/policies/policies.h"

typedef struct step_s {
  int32_t micro_batch; /* out of range: no op */
  int32_t is_forward;
} step_t;

/* Even stages run forwards in even steps, odd ones in odd steps. Division rounds down, including for negative
 * numbers. */
static step_t step_of(const sluice_pipeline_spec_t* spec, int32_t stage, int32_t step) {
  int32_t is_forward = step % 2 == stage % 2, base = step / 2;
  if (is_forward) return (step_t){base - stage / 2, 1};
  if (step % 2 == 0) return (step_t){base - spec->num_stages + (stage + 1) / 2, 0};
  return (step_t){base - spec->num_stages + 1 + stage / 2, 0};
}

static int exists(const sluice_pipeline_spec_t* spec, int32_t micro_batch) {
  return micro_batch >= 0 && micro_batch < spec->num_micro_batches;
}

static void order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int has_previous = stage > 0, has_next = stage + 1 < spec->num_stages;
  int32_t last = -1;
  for (int32_t i = 0; i < 2 * (spec->num_micro_batches + spec->num_stages - 1); ++i) {
    step_t step = step_of(spec, stage, i);
    int runs = exists(spec, step.micro_batch);
    if (step.is_forward) {
      if (exists(spec, last) && has_previous) sluice_order_add(out, SLUICE_STAGE_SEND_GRADIENT, stage, last);
      if (runs && has_previous) sluice_order_add(out, SLUICE_STAGE_RECEIVE_ACTIVATION, stage, step.micro_batch);
    } else {
      if (runs && has_next) sluice_order_add(out, SLUICE_STAGE_RECEIVE_GRADIENT, stage, step.micro_batch);
      if (exists(spec, last) && has_next) sluice_order_add(out, SLUICE_STAGE_SEND_ACTIVATION, stage, last);
    }
    if (runs) {
      sluice_order_add(out, step.is_forward ? SLUICE_STAGE_FORWARD : SLUICE_STAGE_BACKWARD, stage, step.micro_batch);
    }
    last = step.micro_batch;
  }
}

const sluice_policy_t sluice_policy_deepspeed = {
    .name = "deepspeed",
    .source = "DeepSpeed 0.19.8, runtime/pipe/schedule.py, TrainSchedule",
    .is_planned = 1,
    .is_blocking = 1,
    .placement = -1,
    .min_virtual = 1,
    .max_virtual = 1,
    .separate_wgrad = 0,
    .order = order,
};
