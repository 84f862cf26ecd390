// SPDX-License-Identifier: Apache-2.0
/* Builds the program of a spec: ops, slots, needs, matches, the policy's order.
 *
 * What does not fit is refused: a field out of range, a spec that the policy does not take, an order that leaves an op
 * out, has one twice or cannot run under the limits, bytes beyond a stage's limit. The first refusal stays and nothing
 * is built. Setup-only: one thread per call, any number of calls. */
#ifndef SLUICE_BACKEND_PIPELINE_BUILD_H_
#define SLUICE_BACKEND_PIPELINE_BUILD_H_

#include "backend/pipeline/program.h"

/* Limits that the spec leaves open become the policy's: what its order has in flight where it has one, else p, the
 * default of [AxoNN, section IV-A]. out_program: new, sluice_pipeline_program_destroy. Errors: INVALID_ARGUMENT,
 * OVER_BUDGET (byte_limit), NO_MEMORY, INTERNAL (a policy whose order is none). */
sluice_status_t sluice_pipeline_program_build(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                              sluice_pipeline_program_t** out_program);

#endif /* SLUICE_BACKEND_PIPELINE_BUILD_H_ */
