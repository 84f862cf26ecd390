// SPDX-License-Identifier: Apache-2.0
/* Evaluation: forwards in the order in which their inputs arrive. */
#include "backend/pipeline/policies/policies.h"

static int before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) {
  if (a->virtual_stage != b->virtual_stage) return a->virtual_stage > b->virtual_stage;
  return a->micro_batch < b->micro_batch;
}

const sluice_policy_t sluice_policy_forward_only = {
    .name = "forward_only",
    .source = "own",
    .placement = -1,
    .min_virtual = 1,
    .separate_wgrad = 0,
    .forward_only = 1,
    .before = before,
};
