// SPDX-License-Identifier: Apache-2.0
/* Plans under one budget, those of a race and those for other sizes of batches: each fits it beside the others, so that
 * ordinary steps can run under any of them.
 *
 * What a pass needs for its time (slots, routing, schedules, GEMMs) is allocated for the largest of them, and
 * counted in each; what outstanding steps hold is then bounded by the one whose steps are largest. So any mixture of
 * steps made under different plans stays under the budget.
 */
#ifndef SLUICE_BACKEND_PLAN_CANDIDATES_H_
#define SLUICE_BACKEND_PLAN_CANDIDATES_H_

#include "backend/plan/plan.h"

/* plans[0] is the cheapest by cost that fits; the others follow in order of cost. Fills 1 to `most` (at most
 * SLUICE_PLAN_CANDIDATES) plans. rates: as sluice_plan_make. One that the problem says is pinned, and that fits, stands
 * alone. Errors: as sluice_plan_make; beside plans for larger batches (the problem's room) where nothing fits is no
 * failure, and an empty set.
 */
sluice_status_t sluice_candidates_make(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                       const sluice_plan_rates_t* rates, int32_t most, sluice_plan_set_t* out_set);

#endif /* SLUICE_BACKEND_PLAN_CANDIDATES_H_ */
