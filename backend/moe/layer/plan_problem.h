// SPDX-License-Identifier: Apache-2.0
/* What plans of a layer are made for: its shape, in its context as it is now. */
#ifndef SLUICE_BACKEND_MOE_LAYER_PLAN_PROBLEM_H_
#define SLUICE_BACKEND_MOE_LAYER_PLAN_PROBLEM_H_

#include "backend/moe/layer/layer.h"
#include "backend/plan/plans_by_size.h"

/* Borrows the layer and its context. two_levels: heard where the layer leaves its levels open. */
sluice_plan_problem_t sluice_layer_plan_problem(const sluice_moe_t* moe, int two_levels);

/* The shares of budgets that a context has, for people. */
sluice_budget_shares_t sluice_context_budget_shares(const sluice_context_t* context);

/* With device memory, under a plan: what a saved buffer (SLUICE_SAVED_*) takes at most, the same for all its steps. */
uint64_t sluice_planned_block_bytes(const sluice_moe_t* moe, int32_t which);
/* And the block for both of a step's tensors, kept or offloaded, that serves all plans of the layer. */
uint64_t sluice_planned_most_block_bytes(const sluice_moe_t* moe, int is_offloaded);

#endif /* SLUICE_BACKEND_MOE_LAYER_PLAN_PROBLEM_H_ */
