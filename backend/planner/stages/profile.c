// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/profile.h"

void sluice_stages_options_of_profile(const sluice_stages_profile_t* p,
                                      sluice_stages_option_t out_options[SLUICE_STAGES_PROFILE_OPTIONS]) {
  out_options[SLUICE_STAGES_KEEP] = (sluice_stages_option_t){.forward_seconds = p->forward_seconds,
                                                             .backward_seconds = p->backward_seconds,
                                                             .held_bytes = p->activation_bytes,
                                                             .working_bytes = p->workspace_bytes,
                                                             .kind = SLUICE_STAGES_KEEP};
  out_options[SLUICE_STAGES_RECOMPUTE] =
      (sluice_stages_option_t){.forward_seconds = p->forward_seconds,
                               .backward_seconds = p->backward_seconds + p->recompute_seconds,
                               .held_bytes = p->checkpoint_bytes,
                               .working_bytes = p->workspace_bytes + p->activation_bytes - p->checkpoint_bytes,
                               .kind = SLUICE_STAGES_RECOMPUTE};
  out_options[SLUICE_STAGES_OFFLOAD] =
      (sluice_stages_option_t){.forward_seconds = p->forward_seconds,
                               .backward_seconds = p->backward_seconds,
                               .copied_bytes = p->activation_bytes,
                               .working_bytes = p->workspace_bytes + p->activation_bytes,
                               .kind = SLUICE_STAGES_OFFLOAD};
}
