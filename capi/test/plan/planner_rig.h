// SPDX-License-Identifier: Apache-2.0
/* A planner for an invented machine, and a workload. */
#pragma once

#include "sluice/planner.h"

extern const char planner_machine[]; /* JSON */

/* The planner of that machine, for all cases of a program: run_cases(planner_open, planner_close). */
extern sluice_planner_t* planner;
int planner_open(void** state);
int planner_close(void** state);
/* T 2048, M 256, H 1024, E 8, K 2, W 4, f32. */
sluice_planner_workload_t new_workload(void);
/* Fails the test if the call fails. */
sluice_planner_prediction_t predict(const sluice_planner_t* of, const sluice_planner_workload_t* workload,
                                    sluice_planner_choice_t choice);

/* What choose has considered, and the index of what it has chosen. */
extern sluice_planner_candidate_t candidates[512];
int32_t choose(const sluice_planner_t* of, const sluice_planner_workload_t* workload,
               const sluice_planner_choice_t* wanted, int32_t* out_count);
