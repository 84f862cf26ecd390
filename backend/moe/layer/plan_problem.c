// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/layer/plan_problem.h"

#include <assert.h>
#include <string.h>

#include "backend/model/pass_sizes.h"
#include "backend/moe/context/row_memory.h"

static double price(void* user, const sluice_plan_data_t* plan) {
  const sluice_moe_t* moe = user;
  sluice_policy_hook_t* policy_hook = moe->context->policy_hook;
  return policy_hook->vtable->price(policy_hook, moe, plan);
}

static int32_t is_pinned(void* user, const sluice_plan_data_t* plan) {
  const sluice_moe_t* moe = user;
  sluice_policy_hook_t* policy_hook = moe->context->policy_hook;
  return policy_hook->vtable->is_pinned(policy_hook, moe, plan);
}

static_assert(SLUICE_BORROWED_GEMM_BYTES == SLUICE_GEMM_SCRATCH_BYTES, "what plans count is what GEMMs may borrow");

sluice_budget_shares_t sluice_context_budget_shares(const sluice_context_t* context) {
  return (sluice_budget_shares_t){context->memory_budget, context->host_memory_budget, context->shared_memory_budget,
                                  context->shared_host_memory_budget};
}

sluice_plan_problem_t sluice_layer_plan_problem(const sluice_moe_t* moe, int two_levels) {
  sluice_context_t* context = moe->context;
  sluice_device_t* device = context->device;
  sluice_plan_problem_t problem = {
      .shape = moe->shape,
      .header_bytes = context->header.capacity,
      .gemm_bytes = strcmp(context->gemm->name, "ref") == 0 ? 0 : SLUICE_BORROWED_GEMM_BYTES,
      .events_bytes = device->vtable->events_bytes,
      .device = device,
      .device_scratch = sluice_rows_routing_scratch(context->rows, device),
      .rings = &context->rings,
      .shares = sluice_context_budget_shares(context),
      .user = (void*)(uintptr_t)moe,
  };
  sluice_shape_take_deduplication(&problem.shape,
                                  two_levels ? SLUICE_DEDUPLICATE_NODES : sluice_shape_deduplication(&moe->shape));
  if (context->policy_hook != NULL) problem.price = price, problem.is_pinned = is_pinned;
  return problem;
}

uint64_t sluice_planned_block_bytes(const sluice_moe_t* moe, int32_t which) {
  const sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, moe->plan->two_levels);
  return sluice_plan_block_bytes(&problem, moe->plan, which);
}

uint64_t sluice_planned_most_block_bytes(const sluice_moe_t* moe, int is_offloaded) {
  const sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, moe->plan->two_levels);
  return sluice_plans_most_block_bytes(moe->plans, &problem, is_offloaded);
}
