// SPDX-License-Identifier: Apache-2.0
/* Policies of pipelines by their names. */
#ifndef SLUICE_CAPI_SRC_PIPELINE_POLICY_H_
#define SLUICE_CAPI_SRC_PIPELINE_POLICY_H_

#include <stdint.h>

#include "sluice/base.h"

/* SLUICE_POLICY_*; NULL is the default. Errors: INVALID_ARGUMENT naming those that are known. */
sluice_status_t sluice_capi_policy(const char* name, int32_t* out_policy);
/* Of a batch that nobody runs: the baseline too. */
sluice_status_t sluice_capi_simulated_policy(const char* name, int32_t* out_policy);

#endif /* SLUICE_CAPI_SRC_PIPELINE_POLICY_H_ */
