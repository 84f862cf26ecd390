// SPDX-License-Identifier: Apache-2.0
/* Installs and removes the plan in force of a layer. backend/plan makes plans. */
#pragma once

#include "backend/moe/layer/plan_problem.h"
#include "backend/plan/plans_by_size.h"

/* The fewest bytes that the layer's own plan for passes of num_tokens would need, on this rank. */
sluice_status_t sluice_planned_least_bytes(const sluice_moe_t* moe, int64_t num_tokens, uint64_t* out_bytes);

/* Allocates everything that the plan fixes; from then on only steps are allocated, up to the budget. The plan becomes
 * the layer's only one. */
sluice_status_t sluice_plan_install(sluice_moe_t* moe, const sluice_plan_data_t* plan);

/* Marks the plan in force as given by the host. */
void sluice_plan_was_given(sluice_moe_t* moe);

/* Lifts the limits of plans that the host gave with the last such plan of the context: when the plan is removed, or
 * when its layer is destroyed, even if outstanding steps still hold the layer. */
void sluice_plan_lift_limits(sluice_moe_t* moe);

/* Removes the plan: the layer runs without one, or makes its own under the context's budget. */
void sluice_plan_remove(sluice_moe_t* moe);

/* Allocates for all plans of a set, for batches of the largest size; puts the first plan in force. */
sluice_status_t sluice_plan_install_set(sluice_moe_t* moe, const sluice_plan_set_t* set);

/* Puts this one of the layer's plans in force. */
void sluice_plan_take(sluice_moe_t* moe, int32_t number);

/* Bytes allocated now, except the arenas that a plan sizes again. */
uint64_t sluice_plan_base_bytes(sluice_context_t* context);
