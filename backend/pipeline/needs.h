// SPDX-License-Identifier: Apache-2.0
/* Derives the needs of ops from the slots that they touch. Private to backend/pipeline. */
#pragma once

#include "backend/pipeline/program.h"

/* Fills first_need, num_needs and at most `capacity` entries of program->needs; num_needs of the program is the number
 * of entries. Two ops of a stage that touch the same slot, one of them writing, keep their order in the list of ops;
 * the flush comes last. Needs that other needs imply are omitted. Errors: NO_MEMORY, INTERNAL (capacity). */
sluice_status_t sluice_pipeline_derive_needs(sluice_pipeline_program_t* program, int32_t capacity,
                                             sluice_allocator_t* allocator);
/* Returns a sufficient capacity. */
int32_t sluice_pipeline_max_needs(int32_t num_ops);
