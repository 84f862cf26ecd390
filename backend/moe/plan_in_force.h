/* The plan in force: installed, given by the host, lifted. What plans are and how they are made: backend/plan. */
#ifndef SLUICE_BACKEND_MOE_PLAN_IN_FORCE_H_
#define SLUICE_BACKEND_MOE_PLAN_IN_FORCE_H_

#include "backend/moe/layer.h"
#include "backend/plan/plan.h"

/* Whether passes of this layer run under a plan. */
static inline int sluice_is_planned(const sluice_moe_t* moe) {
  const sluice_context_t* context = moe->context;
  return moe->plan != NULL || context->memory_budget > 0 || context->host_memory_budget > 0;
}

/* What plans of this layer are made for, in its context as it is now. Borrows both. */
sluice_plan_problem_t sluice_layer_plan_problem(const sluice_moe_t* moe);

/* The shares of budgets that a context has, for people. */
sluice_budget_shares_t sluice_context_budget_shares(const sluice_context_t* context);

/* The fewest bytes that the layer's own plan for passes of num_tokens would need, on this rank. */
sluice_status_t sluice_planned_least_bytes(const sluice_moe_t* moe, int64_t num_tokens, uint64_t* out_bytes);

/* On a far device, under a plan: the block of a saved buffer (SLUICE_SAVED_*), the same for each step. */
uint64_t sluice_planned_block_bytes(const sluice_moe_t* moe, int32_t which);

/* Allocates everything that the plan fixes; from then on only steps are allocated, up to the budget. The layer's set is
 * this plan alone. */
sluice_status_t sluice_plan_install(sluice_moe_t* moe, const sluice_plan_data_t* plan);

/* The plan in force is the host's from now on. */
void sluice_plan_was_given(sluice_moe_t* moe);

/* Limits of a plan that the host gave go with the last such plan of the context: when it is taken away, and when its
 * layer is destroyed, though outstanding steps still hold the layer. */
void sluice_plan_lift_limits(sluice_moe_t* moe);

/* The layer runs without a plan, or makes its own under the context's budget. */
void sluice_plan_remove(sluice_moe_t* moe);

/* Allocates for all plans of a set; the first is in force. */
sluice_status_t sluice_plan_install_set(sluice_moe_t* moe, const sluice_plan_set_t* set);

/* What is allocated now besides the arenas that a plan sizes anew. */
uint64_t sluice_plan_base_bytes(sluice_context_t* context);

#endif /* SLUICE_BACKEND_MOE_PLAN_IN_FORCE_H_ */
