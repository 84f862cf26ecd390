// SPDX-License-Identifier: Apache-2.0
/* Builds templates from specs. */
#pragma once

#include "backend/schedule/schedule.h"

/* out_template: new, release with sluice_template_destroy. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                      sluice_template_t** out_template);
void sluice_template_destroy(sluice_template_t* schedule, sluice_allocator_t* allocator);

/* Builds the template in memory of the caller, at least sluice_template_bytes of the spec, aligned to 64; it must not
 * be destroyed. */
sluice_status_t sluice_template_build_into(const sluice_template_spec_t* spec, void* memory,
                                           sluice_template_t** out_template);
uint64_t sluice_template_bytes(int32_t num_chunks, int32_t has_two_levels);
/* Returns the maximum number of ops of a template with n chunks. */
int32_t sluice_template_max_ops(int32_t num_chunks, int32_t has_two_levels);
int32_t sluice_template_max_deps(int32_t num_chunks, int32_t has_two_levels);
