// SPDX-License-Identifier: Apache-2.0
/* Algorithm 2 of AxoNN as printed. A stage runs what arrived first, but runs what its own last op made ready before
 * that: the first stage injects L micro-batches, then one for each gradient that returned (lines 3 to 9, 23 to 26), and
 * the last stage runs the backward of each micro-batch directly after its forward (lines 15 to 17). */
#include "backend/pipeline/policies/policies.h"

static int before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) {
  int a_waits = a->kind == SLUICE_STAGE_WEIGHT_GRAD, b_waits = b->kind == SLUICE_STAGE_WEIGHT_GRAD;
  if (a_waits != b_waits) return b_waits; /* not in the paper: nothing waits for a weight gradient */
  if (a->by_message != b->by_message) return b->by_message;
  return a->since < b->since;
}

const sluice_policy_t sluice_policy_message_driven = {
    .name = "message_driven",
    .source = "AxoNN, Algorithm 2",
    .placement = -1,
    .min_virtual = 1,
    .separate_wgrad = -1,
    .before = before,
};
