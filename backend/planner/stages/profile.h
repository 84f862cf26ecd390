// SPDX-License-Identifier: Apache-2.0
/* The three options of a layer whose activations are kept, recomputed or offloaded as a whole. */
#pragma once

#include "backend/planner/stages/problem/model.h"

/* Measurements of a layer. */
typedef struct sluice_stages_profile_s {
  double forward_seconds;
  double backward_seconds;
  double recompute_seconds;  /* of the repeated forward, before the backward */
  uint64_t activation_bytes; /* needed by the backward, including the layer's input */
  uint64_t checkpoint_bytes; /* start of recomputation: the layer's input. <= activation_bytes */
  uint64_t workspace_bytes;  /* while it runs, with any option */
} sluice_stages_profile_t;

enum { SLUICE_STAGES_PROFILE_OPTIONS = 3 };

/* Makes the three options. Keep: all activations are held. Recompute: the checkpoint is held, and the rest exists once
 * while the layer runs. Offload: all go to host memory, and exist once while the layer runs. Indexed by
 * SLUICE_STAGES_KEEP, _RECOMPUTE, _OFFLOAD. Any thread; no errors. */
void sluice_stages_options_of_profile(const sluice_stages_profile_t* profile,
                                      sluice_stages_option_t out_options[SLUICE_STAGES_PROFILE_OPTIONS]);
