/* Messages between neighbouring stages: an output that a later stage reads crosses every boundary on its way once, and
 * its gradient comes back. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_PROBLEM_MESSAGES_H_
#define SLUICE_BACKEND_PLANNER_STAGES_PROBLEM_MESSAGES_H_

#include "backend/planner/stages/problem/tables.h"

/* Bytes that cross from stage `boundary` to the next, one way. stage_of: [num_layers]. */
uint64_t sluice_stages_boundary_bytes(const sluice_stages_tables_t* tables, const int32_t* stage_of, int32_t boundary);

/* Of a stage's buffers: one of what comes in, and all outputs whose backward has not been: stages hold on to them. */
uint64_t sluice_stages_message_bytes(const sluice_stages_tables_t* tables, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes);

/* For how long both directions of `bytes` take the link behind stage `boundary`; nothing is sent of no bytes. */
double sluice_stages_link_seconds(const sluice_stages_problem_t* problem, int32_t boundary, uint64_t bytes);

/* What a stage's links are busy for; in_bytes come over the one in front of it, out_bytes go over the one behind. */
double sluice_stages_message_seconds(const sluice_stages_problem_t* problem, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes);

/* Seconds of a stage by what its parts take. */
double sluice_stages_turn_seconds(const sluice_stages_problem_t* problem, double compute, double messages,
                                  double copies);

/* Seconds for copying so many bytes out and back in; INFINITY where nothing can be copied. */
double sluice_stages_copy_seconds(const sluice_stages_problem_t* problem, uint64_t bytes);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_PROBLEM_MESSAGES_H_ */
