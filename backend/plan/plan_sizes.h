// SPDX-License-Identifier: Apache-2.0
/* Functions that the files of a plan share: its capacities in rows and bytes. Private to backend/plan. */
#pragma once

#include "backend/base/math.h"
#include "backend/model/restore.h"
#include "backend/plan/plan.h"

/* Returns the problem of the rank with the most experts, since capacities are the same on all ranks. */
static inline sluice_plan_problem_t sluice_plan_problem_widest(const sluice_plan_problem_t* problem) {
  sluice_plan_problem_t widest = *problem;
  widest.shape = sluice_shape_widest(&problem->shape);
  return widest;
}

/* ---- rows (plan_rows.c) ---- */

/* Returns the rows that a rank receives with `max_tokens` tokens on each rank if all experts get equally many. */
int64_t sluice_plan_balanced_rows(const sluice_plan_problem_t* problem, int64_t max_tokens);
/* Returns `rows` divided into `parts`, with the slack that chunks may have over balanced routing before they get fewer
 * blocks. */
int64_t sluice_plan_with_slack(int64_t rows, int64_t parts);
/* Sets blocks, chunks and their rows for n chunks of balanced routing. */
void sluice_plan_set_capacities(const sluice_plan_problem_t* problem, int32_t n, sluice_plan_data_t* plan);
/* Returns the maximum number of rows that this rank may send in one chunk. */
int64_t sluice_plan_sent_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
/* _travelling_rows returns rows of one chunk that are in flight or returned at the same time; _arriving_token_copies
 * token copies that arrive in it, including own ones (with deduplication at most one of each token for each rank);
 * _forwards, with two levels, rows that a rank forwards. */
int64_t sluice_plan_travelling_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
int64_t sluice_plan_arriving_token_copies(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
int64_t sluice_plan_forwards(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
/* Returns the maximum number of rows of a pass for any ids, including repeated ones. */
int64_t sluice_plan_any_rows(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);

/* ---- bytes (plan_bytes.c) ---- */

/* Returns the bytes of a row of the tensors for whose policy in any chunk `is_so` holds. */
uint64_t sluice_plan_row_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                               sluice_restore_question_t is_so);
/* Returns the bytes of the host pool if `kept_rows` rows of each outstanding forward are offloaded. */
uint64_t sluice_plan_host_pool_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                     int64_t kept_rows);
/* Returns the bytes of the kept and offloaded rows of one outstanding forward, at their capacities. */
uint64_t sluice_plan_saved_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);
/* Builds a template that has all rings of the plan's templates, with few chunks; with a capacity, the template that
 * will run. weights: SLUICE_WEIGHTS_* of a backward. out_schedule: new, of the process's allocator. */
sluice_status_t sluice_plan_small_template(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                           int32_t direction, int32_t weights, sluice_template_t** out_schedule);
/* Returns the slots of that template. */
sluice_status_t sluice_plan_small_rings(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                        int32_t direction, int32_t weights, sluice_plan_rings_t* out_rings);
/* Returns the bytes of all slots of a tensor at the capacities, with such rings; 0 for tensors that steps keep and for
 * the host's tensors. */
uint64_t sluice_plan_tensor_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                  const sluice_plan_rings_t* rings, int32_t tensor);
/* Returns the bytes of one direction: slots, and the scratch after them. */
sluice_status_t sluice_plan_slot_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                       int32_t direction, uint64_t* out_bytes);
