// SPDX-License-Identifier: Apache-2.0
/* Sets of plans under one budget, for a race and for other batch sizes: they fit the budget together, so that ordinary
 * steps can run under any of them.
 *
 * Memory that is only needed during a pass (slots, routing, schedules, GEMMs) is allocated for the largest plan, and
 * counted in each; the memory of outstanding steps is then bounded by the plan with the largest steps. So any mixture
 * of steps under different plans stays within the budget. */
#pragma once

#include "backend/plan/plan.h"

/* plans[0] is the cheapest by cost that fits; the others follow in order of cost. Fills 1 to `most` (at most
 * SLUICE_PLAN_CANDIDATES) plans. rates: as sluice_plan_make. A plan that the problem pins, and that fits, is the only
 * one. Errors: as sluice_plan_make; but if there are plans for larger batches (the problem's room) and nothing fits,
 * the result is an empty set and no failure. */
sluice_status_t sluice_candidates_make(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                       const sluice_plan_rates_t* rates, int32_t most, sluice_plan_set_t* out_set);
