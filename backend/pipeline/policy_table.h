// SPDX-License-Identifier: Apache-2.0
/* The table of policies. Immutable; any thread. */
#pragma once

#include "backend/pipeline/policy.h"

/* Returns the row, or NULL for an unknown number. */
const sluice_policy_t* sluice_policy(int32_t policy);
/* Returns its name; "adaptive" for an open policy, "?" for an unknown number. */
const char* sluice_policy_name(int32_t policy);
/* Checks that a policy supports this spec. Errors: INVALID_ARGUMENT naming the requirement. */
sluice_status_t sluice_policy_check(const sluice_pipeline_spec_t* spec);
