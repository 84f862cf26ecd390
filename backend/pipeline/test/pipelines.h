// SPDX-License-Identifier: Apache-2.0
/* Specs and programs for the tests of this folder. */
#pragma once

#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/pipeline/build.h"

/* Every limit at L (0: the policy's own), one receive ahead; separate_wgrad and forward_only as the policy requires. */
sluice_pipeline_spec_t pipeline_of(int32_t p, int32_t v, int32_t m, int32_t policy, int32_t in_flight);
/* The test fails if there is no program. */
sluice_pipeline_program_t* program_of(const sluice_pipeline_spec_t* spec);
void free_program(sluice_pipeline_program_t* program);
/* Fails unless the spec is rejected with the status and a message that contains the text. */
void assert_refused(const sluice_pipeline_spec_t* spec, sluice_status_t status, const char* text);
