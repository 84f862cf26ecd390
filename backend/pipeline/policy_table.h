// SPDX-License-Identifier: Apache-2.0
/* The table of policies. Immutable; any thread. */
#ifndef SLUICE_BACKEND_PIPELINE_POLICY_TABLE_H_
#define SLUICE_BACKEND_PIPELINE_POLICY_TABLE_H_

#include "backend/pipeline/policy.h"

/* The row, or NULL for a number that is none. */
const sluice_policy_t* sluice_policy(int32_t policy);
/* Its name; that of an open policy is "adaptive", of a number that is none "?". */
const char* sluice_policy_name(int32_t policy);
/* Whether a policy takes this spec. Errors: INVALID_ARGUMENT saying what it asks for. */
sluice_status_t sluice_policy_check(const sluice_pipeline_spec_t* spec);

#endif /* SLUICE_BACKEND_PIPELINE_POLICY_TABLE_H_ */
