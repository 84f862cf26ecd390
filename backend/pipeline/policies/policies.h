// SPDX-License-Identifier: Apache-2.0
/* The rows of the table of policies; each is in the file with its name. Private to backend/pipeline. */
#pragma once

#include "backend/pipeline/policy.h"

extern const sluice_policy_t sluice_policy_message_driven;
extern const sluice_policy_t sluice_policy_backward_first;
extern const sluice_policy_t sluice_policy_1f1b_hint;
extern const sluice_policy_t sluice_policy_1f1b;
extern const sluice_policy_t sluice_policy_gpipe;
extern const sluice_policy_t sluice_policy_zero_bubble;
extern const sluice_policy_t sluice_policy_looped;
extern const sluice_policy_t sluice_policy_v;
extern const sluice_policy_t sluice_policy_forward_only;
extern const sluice_policy_t sluice_policy_deepspeed;
