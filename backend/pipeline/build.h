// SPDX-License-Identifier: Apache-2.0
/* Builds the program of a spec: ops, slots, needs, matches, the policy's order.
 *
 * Refused are: a field out of range, a spec that the policy does not support, an order that lacks an op, has one twice
 * or cannot run under the limits, bytes beyond a stage's limit. The first refusal is reported and nothing is built.
 * Setup-only: one thread per call, any number of calls. */
#pragma once

#include "backend/pipeline/program.h"

/* Open limits of the spec are set by the policy: to what its order has in flight if it has one, else to p, the default
 * of [AxoNN, section IV-A]. out_program: new, release with sluice_pipeline_program_destroy. Errors: INVALID_ARGUMENT,
 * OVER_BUDGET (byte_limit), NO_MEMORY, INTERNAL (an invalid order of a policy). */
sluice_status_t sluice_pipeline_program_build(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                              sluice_pipeline_program_t** out_program);
