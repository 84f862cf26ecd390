// SPDX-License-Identifier: Apache-2.0
/* What the files of a plan share: its capacities in rows and bytes. Private to backend/plan. */
#ifndef SLUICE_BACKEND_PLAN_PLAN_SIZES_H_
#define SLUICE_BACKEND_PLAN_PLAN_SIZES_H_

#include "backend/base/math.h"
#include "backend/model/restore.h"
#include "backend/plan/plan.h"

/* The same as the rank with most experts sees it: capacities are the same on all ranks. */
static inline sluice_plan_problem_t sluice_plan_problem_widest(const sluice_plan_problem_t* problem) {
  sluice_plan_problem_t widest = *problem;
  widest.shape = sluice_shape_widest(&problem->shape);
  return widest;
}

/* ---- rows (plan_rows.c) ---- */

/* Rows that a rank receives of `max_tokens` on each when all experts get alike. */
int64_t sluice_plan_balanced_rows(const sluice_plan_problem_t* problem, int64_t max_tokens);
/* So many rows in `parts`, with what chunks may have beyond balanced routing before they are cut shorter. */
int64_t sluice_plan_with_slack(int64_t rows, int64_t parts);
/* Fills in blocks, chunks and their rows for n chunks of balanced routing. */
void sluice_plan_set_capacities(const sluice_plan_problem_t* problem, int32_t n, sluice_plan_data_t* plan);
/* Rows that this rank may send in one chunk. */
int64_t sluice_plan_sent_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
/* Rows of one chunk that are on their way or have come back at once, and token copies that arrive in it, own ones among
 * them: where the layer is deduplicated, of each token at most one for each rank. In two levels, what a rank passes on.
 */
int64_t sluice_plan_travelling_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
int64_t sluice_plan_arriving_token_copies(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
int64_t sluice_plan_forwards(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
/* Rows of a pass whatever the ids, repeated ones too. */
int64_t sluice_plan_any_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);

/* ---- bytes (plan_bytes.c) ---- */

/* Of a row, the tensors whose policy in any chunk is so. */
uint64_t sluice_plan_row_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                               sluice_restore_question_t is_so);
/* Of the host pool, when `kept_rows` rows of each outstanding forward are offloaded. */
uint64_t sluice_plan_host_pool_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                     int64_t kept_rows);
/* Of the kept and offloaded rows of one outstanding forward, at their capacities. */
uint64_t sluice_plan_saved_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
/* A template that has all the rings of the plan's, with few chunks; under a capacity the one that will run. weights:
 * SLUICE_WEIGHTS_* of a backward. out_schedule: new, of the process's allocator. */
sluice_status_t sluice_plan_small_template(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                           int32_t direction, int32_t weights, sluice_template_t** out_schedule);
/* The slots of that template. */
sluice_status_t sluice_plan_small_rings(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                        int32_t direction, int32_t weights, sluice_plan_rings_t* out_rings);
/* Of all slots of a tensor at the capacities, by such rings; 0 for what steps keep and the host's own tensors. */
uint64_t sluice_plan_tensor_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                  const sluice_plan_rings_t* rings, int32_t tensor);
/* Of one direction: slots, and the scratch behind them. */
sluice_status_t sluice_plan_slot_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                       int32_t direction, uint64_t* out_bytes);
/* Of the arenas of routes and offsets, of places of slots, of rows by block (0: nothing is cut), of token copies (0:
 * rows travel), and of node copies (0: one level). */
uint64_t sluice_plan_routing_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
uint64_t sluice_plan_layout_bytes(const sluice_plan_data_t* plan);
uint64_t sluice_plan_chunking_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
uint64_t sluice_plan_token_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
uint64_t sluice_plan_node_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
/* Of the saved form of node copies, in so many chunks, at most. */
uint64_t sluice_plan_node_copies_meta_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                            int32_t num_chunks);
/* With device memory, of the arenas of token copies and of node copies in its memory; part of routing. */
uint64_t sluice_plan_device_token_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
uint64_t sluice_plan_device_node_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);

#endif /* SLUICE_BACKEND_PLAN_PLAN_SIZES_H_ */
