// SPDX-License-Identifier: Apache-2.0
/* Finds policies of pipelines by name. */
#pragma once

#include <stdint.h>

#include "sluice/base.h"

/* Finds a SLUICE_POLICY_*; NULL is the default. Errors: INVALID_ARGUMENT naming the known ones. */
sluice_status_t sluice_capi_policy(const char* name, int32_t* out_policy);
/* For a batch that is only simulated: also finds the baseline. */
sluice_status_t sluice_capi_simulated_policy(const char* name, int32_t* out_policy);
