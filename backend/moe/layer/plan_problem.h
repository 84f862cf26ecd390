/* What plans of a layer are made for: its shape, in its context as it is now. */
#ifndef SLUICE_BACKEND_MOE_LAYER_PLAN_PROBLEM_H_
#define SLUICE_BACKEND_MOE_LAYER_PLAN_PROBLEM_H_

#include "backend/moe/layer/layer.h"
#include "backend/plan/plan.h"

/* Borrows the layer and its context. two_levels: heard where the layer leaves its levels open. */
sluice_plan_problem_t sluice_layer_plan_problem(const sluice_moe_t* moe, int two_levels);

/* The shares of budgets that a context has, for people. */
sluice_budget_shares_t sluice_context_budget_shares(const sluice_context_t* context);

/* With device memory, under a plan: the block of a saved buffer (SLUICE_SAVED_*), the same for each step. */
uint64_t sluice_planned_block_bytes(const sluice_moe_t* moe, int32_t which);

#endif /* SLUICE_BACKEND_MOE_LAYER_PLAN_PROBLEM_H_ */
