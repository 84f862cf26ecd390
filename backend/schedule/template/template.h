// SPDX-License-Identifier: Apache-2.0
/* Builds templates from specs. */
#ifndef SLUICE_BACKEND_SCHEDULE_TEMPLATE_TEMPLATE_H_
#define SLUICE_BACKEND_SCHEDULE_TEMPLATE_TEMPLATE_H_

#include "backend/schedule/schedule.h"

/* out_template: new, sluice_template_destroy. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                      sluice_template_t** out_template);
void sluice_template_destroy(sluice_template_t* schedule, sluice_allocator_t* allocator);

/* The same in memory of the caller, at least sluice_template_bytes of the spec, aligned to 64; not to be destroyed. */
sluice_status_t sluice_template_build_into(const sluice_template_spec_t* spec, void* memory,
                                           sluice_template_t** out_template);
uint64_t sluice_template_bytes(int32_t num_chunks, int32_t has_two_levels);
/* The most ops of a template of n chunks. */
int32_t sluice_template_max_ops(int32_t num_chunks, int32_t has_two_levels);
int32_t sluice_template_max_deps(int32_t num_chunks, int32_t has_two_levels);

/* For readers of external templates: an empty template of a checked spec with space for the most that n chunks can
 * have, and, once it is filled and proved, its runs and hashes. Errors: INVALID_ARGUMENT, UNSUPPORTED (the spec),
 * NO_MEMORY. */
sluice_status_t sluice_template_new(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                    sluice_template_t** out_template);
void sluice_template_seal(sluice_template_t* schedule);

#endif /* SLUICE_BACKEND_SCHEDULE_TEMPLATE_TEMPLATE_H_ */
