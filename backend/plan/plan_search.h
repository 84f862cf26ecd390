// SPDX-License-Identifier: Apache-2.0
/* Candidates under given restrictions, and what to change where none of them fits. Private to backend/plan. */
#ifndef SLUICE_BACKEND_PLAN_PLAN_SEARCH_H_
#define SLUICE_BACKEND_PLAN_PLAN_SEARCH_H_

#include "backend/plan/plan.h"

typedef struct sluice_plan_search_s {
  sluice_plan_data_t best;    /* the cheapest that fits; of num_fitting > 0 */
  sluice_plan_data_t leanest; /* of num_seen > 0 */
  int32_t num_fitting, num_seen;
  int32_t most_outstanding; /* forwards that the budgets have room for, with whichever candidate; of num_fitting == 0 */
} sluice_plan_search_t;

/* Looks at every candidate that the inputs allow, whether it fits or not. */
sluice_status_t sluice_plan_search(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                   const sluice_plan_rates_t* rates, sluice_plan_visit_fn_t visit, void* user,
                                   sluice_plan_search_t* out);

/* Whether a candidate may have these policies: of callback experts, what they can do. Lists have been checked where
 * they were read. */
int sluice_plan_is_allowed(const sluice_plan_problem_t* problem, int32_t restore_input, int32_t restore_pre_activation);

/* Whether chunks can be sent and computed again whose rows find no room. */
int sluice_plan_can_fall_back(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);

/* OVER_BUDGET for a search in which nothing fits. The cheapest change is found by searching again with n, the policy
 * or max_outstanding left open, one at a time and then together; that of the least cost is named. */
sluice_status_t sluice_plan_fail_over_budget(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                             const sluice_plan_rates_t* rates, const sluice_plan_search_t* search);

#endif /* SLUICE_BACKEND_PLAN_PLAN_SEARCH_H_ */
