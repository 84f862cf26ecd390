// SPDX-License-Identifier: Apache-2.0
/* A planner for an invented machine, and a workload. */
#ifndef SLUICE_CAPI_TEST_PLAN_PLANNER_RIG_H_
#define SLUICE_CAPI_TEST_PLAN_PLANNER_RIG_H_

#include "sluice/planner.h"

extern const char planner_machine[]; /* JSON */
uint64_t planner_machine_length(void);

sluice_planner_t* new_planner(void);
/* T 2048, M 256, H 1024, E 8, K 2, W 4, f32. */
sluice_planner_workload_t new_workload(void);
/* Fails the test if the call fails. */
sluice_planner_prediction_t predict(const sluice_planner_t* planner, const sluice_planner_workload_t* workload,
                                    sluice_planner_choice_t choice);

#endif /* SLUICE_CAPI_TEST_PLAN_PLANNER_RIG_H_ */
