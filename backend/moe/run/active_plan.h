// SPDX-License-Identifier: Apache-2.0
/* The plan in force: installed, given by the host, lifted. What plans are and how they are made: backend/plan. */
#ifndef SLUICE_BACKEND_MOE_RUN_ACTIVE_PLAN_H_
#define SLUICE_BACKEND_MOE_RUN_ACTIVE_PLAN_H_

#include "backend/moe/layer/plan_problem.h"
#include "backend/plan/plans_by_size.h"

/* The fewest bytes that the layer's own plan for passes of num_tokens would need, on this rank. */
sluice_status_t sluice_planned_least_bytes(const sluice_moe_t* moe, int64_t num_tokens, uint64_t* out_bytes);

/* Allocates everything that the plan fixes; from then on only steps are allocated, up to the budget. It is the
 * layer's only one. */
sluice_status_t sluice_plan_install(sluice_moe_t* moe, const sluice_plan_data_t* plan);

/* The plan in force is the host's from now on. */
void sluice_plan_was_given(sluice_moe_t* moe);

/* Limits of a plan that the host gave go with the last such plan of the context: when it is taken away, and when its
 * layer is destroyed, though outstanding steps still hold the layer. */
void sluice_plan_lift_limits(sluice_moe_t* moe);

/* The layer runs without a plan, or makes its own under the context's budget. */
void sluice_plan_remove(sluice_moe_t* moe);

/* Allocates for all plans of a set, for batches of the largest size; the first is in force. */
sluice_status_t sluice_plan_install_set(sluice_moe_t* moe, const sluice_plan_set_t* set);

/* This one of the layer's plans is in force. */
void sluice_plan_take(sluice_moe_t* moe, int32_t number);

/* What is allocated now besides the arenas that a plan sizes anew. */
uint64_t sluice_plan_base_bytes(sluice_context_t* context);

#endif /* SLUICE_BACKEND_MOE_RUN_ACTIVE_PLAN_H_ */
