// SPDX-License-Identifier: Apache-2.0
/* Messages between neighbouring stages: an output that a later stage reads crosses every boundary on its way once, and
 * its gradient returns. */
#pragma once

#include "backend/planner/stages/problem/tables.h"

/* Returns the bytes that cross from stage `boundary` to the next, one way. stage_of: [num_layers]. */
uint64_t sluice_stages_boundary_bytes(const sluice_stages_tables_t* tables, const int32_t* stage_of, int32_t boundary);

/* Returns the bytes of a stage's buffers: one for its input, and all outputs whose backward has not run, which stages
 * keep. */
uint64_t sluice_stages_message_bytes(const sluice_stages_tables_t* tables, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes);

/* Returns the seconds of both directions of `bytes` on the link after stage `boundary`; zero bytes send nothing. */
double sluice_stages_link_seconds(const sluice_stages_problem_t* problem, int32_t boundary, uint64_t bytes);

/* Returns the seconds that a stage's links are busy; in_bytes arrive over the link before it, out_bytes leave over the
 * link after it. */
double sluice_stages_message_seconds(const sluice_stages_problem_t* problem, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes);

/* Returns the seconds of a stage from those of its parts. */
double sluice_stages_turn_seconds(const sluice_stages_problem_t* problem, double compute, double messages,
                                  double copies);

/* Returns the seconds for copying the bytes out and back in; INFINITY if nothing can be copied. */
double sluice_stages_copy_seconds(const sluice_stages_problem_t* problem, uint64_t bytes);
