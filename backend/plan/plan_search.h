// SPDX-License-Identifier: Apache-2.0
/* Searches candidates under given restrictions, and finds what to change if none fits. Private to backend/plan. */
#pragma once

#include "backend/plan/plan.h"

typedef struct sluice_plan_search_s {
  sluice_plan_data_t best;    /* the cheapest that fits; valid if num_fitting > 0 */
  sluice_plan_data_t leanest; /* valid if num_seen > 0 */
  int32_t num_fitting, num_seen;
  int32_t most_outstanding; /* maximum number of outstanding forwards that fit the budgets, over all candidates; valid
                               if num_fitting == 0 */
} sluice_plan_search_t;

/* Visits every candidate that the inputs allow, whether it fits or not. */
sluice_status_t sluice_plan_search(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                   const sluice_plan_rates_t* rates, sluice_plan_visit_fn_t visit, void* user,
                                   sluice_plan_search_t* out);

/* Returns whether a candidate may have these policies. Callback experts restrict them. Lists have been checked when
 * they were read. */
int sluice_plan_is_allowed(const sluice_plan_problem_t* problem, int32_t restore_input, int32_t restore_pre_activation);

/* Returns whether chunks whose rows do not fit can be sent and computed again. */
int sluice_plan_can_fall_back(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);

/* Returns OVER_BUDGET for a search in which nothing fits. The cheapest change is found by searching again with n, the
 * policy or max_outstanding left open, one at a time and then together; the one with the least cost is named. */
sluice_status_t sluice_plan_fail_over_budget(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                             const sluice_plan_rates_t* rates, const sluice_plan_search_t* search);
