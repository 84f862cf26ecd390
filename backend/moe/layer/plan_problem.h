// SPDX-License-Identifier: Apache-2.0
/* The input of planning for a layer: its shape, and the current state of its context. */
#pragma once

#include "backend/moe/layer/layer.h"
#include "backend/plan/plans_by_size.h"

/* Borrows the layer and its context. two_levels: used if the layer leaves its levels open. */
sluice_plan_problem_t sluice_layer_plan_problem(const sluice_moe_t* moe, int two_levels);

/* The context's shares of budgets, for messages. */
sluice_budget_shares_t sluice_context_budget_shares(const sluice_context_t* context);

/* With device memory, under a plan: the most bytes of a saved buffer (SLUICE_SAVED_*), the same for all steps. */
uint64_t sluice_planned_block_bytes(const sluice_moe_t* moe, int32_t which);
/* The bytes of a block that holds both tensors of a step, kept or offloaded, under any plan of the layer. */
uint64_t sluice_planned_most_block_bytes(const sluice_moe_t* moe, int is_offloaded);
