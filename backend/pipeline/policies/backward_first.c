// SPDX-License-Identifier: Apache-2.0
/* Runs backwards before forwards before weight gradients; reductions, which only start here, before all of them. With
 * several virtual stages, ops whose output has the longest way go first: forwards nearest to the input, backwards
 * nearest to the loss. So the other stages get work soonest. */
#include "backend/pipeline/policies/policies.h"

static int rank_of(int32_t kind) {
  switch (kind) {
    case SLUICE_STAGE_REDUCE: return 0;
    case SLUICE_STAGE_BACKWARD: return 1;
    case SLUICE_STAGE_FORWARD: return 2;
    default: return 3;
  }
}

static int before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) {
  if (rank_of(a->kind) != rank_of(b->kind)) return rank_of(a->kind) < rank_of(b->kind);
  if (a->virtual_stage != b->virtual_stage) {
    int is_deeper = a->virtual_stage > b->virtual_stage;
    return a->kind == SLUICE_STAGE_FORWARD ? !is_deeper : is_deeper;
  }
  return a->micro_batch < b->micro_batch;
}

const sluice_policy_t sluice_policy_backward_first = {
    .name = "backward_first",
    .source = "own; PipeDream's preference, message-driven",
    .placement = -1,
    .min_virtual = 1,
    .separate_wgrad = -1,
    .before = before,
};
