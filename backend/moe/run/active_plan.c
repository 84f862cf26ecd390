// SPDX-License-Identifier: Apache-2.0
/* Installs plans: allocates everything a plan fixes, and sets limits for the rest. */
#include "backend/moe/run/active_plan.h"

#include "backend/moe/context/row_memory.h"
#include "backend/moe/run/mode.h"
#include "backend/schedule/template/template.h"

/* ---- what is allocated besides ---- */

uint64_t sluice_plan_base_bytes(sluice_context_t* context) { return context->rows->base_bytes(context); }

/* ---- limits ---- */

/* Limits beyond which the allocator and the host pool refuse. */
typedef struct limits_s {
  uint64_t memory, pool; /* 0: none */
  int32_t outstanding;
} limits_t;

static limits_t limits_of(const sluice_context_t* context) {
  return (limits_t){context->memory->limit, context->ledger.pool_limit, context->planned_outstanding};
}

static void set_limits(sluice_context_t* context, limits_t limits) {
  context->memory->limit = limits.memory;
  context->ledger.pool_limit = limits.pool;
  context->planned_outstanding = limits.outstanding;
  sluice_rows_limit_pool(context->rows, context, limits.pool);
}

void sluice_plan_was_given(sluice_moe_t* moe) {
  if (!moe->plan_limits_context) ++moe->context->num_given_plans;
  moe->plan_is_given = moe->plan_limits_context = 1;
}

void sluice_plan_lift_limits(sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  if (!moe->plan_limits_context) return;
  moe->plan_limits_context = 0;
  if (--context->num_given_plans > 0) return;
  const int is_budgeted = context->memory_budget > 0 || context->host_memory_budget > 0;
  set_limits(context, (limits_t){context->memory_budget, context->host_memory_budget,
                                 is_budgeted ? context->planned_outstanding : 0});
}

void sluice_plan_remove(sluice_moe_t* moe) {
  sluice_capacity_forget_agreed(moe);
  sluice_plans_by_size_free(moe->plans);
  moe->plans = NULL;
  moe->plan = NULL;
  moe->plan_is_given = 0;
  sluice_layer_choose_mode(moe);
  sluice_plan_lift_limits(moe);
}

static sluice_status_t reserve_arena(sluice_arena_t* arena, uint64_t bytes, const char* what) {
  return bytes > 0 ? sluice_arena_reserve(arena, bytes, what) : SLUICE_OK;
}

static sluice_status_t reserve(sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  sluice_context_t* context = moe->context;
  const sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, plan->two_levels);
  const sluice_plan_arenas_t arenas = sluice_plan_arenas(&problem, plan);
  sluice_pass_memory_t* memory = &context->pass_memory;
  SLUICE_TRY(reserve_arena(&memory->routes, arenas.routes, "routes of a plan"));
  SLUICE_TRY(reserve_arena(&memory->device_token_copies, arenas.device_token_copies, "token copies of a plan"));
  SLUICE_TRY(reserve_arena(&memory->device_node_copies, arenas.device_node_copies, "node copies of a plan"));
  SLUICE_TRY(sluice_engine_reserve_templates(context, plan->max_chunks, plan->two_levels));
  SLUICE_TRY(reserve_arena(&memory->slots, arenas.slots, "slots of a plan"));
  SLUICE_TRY(reserve_arena(&memory->binding, arenas.binding, "routes and offsets of a plan"));
  SLUICE_TRY(reserve_arena(&memory->layout, arenas.layout, "places of slots of a plan"));
  SLUICE_TRY(reserve_arena(&memory->cut, arenas.cut, "rows by block of a plan"));
  SLUICE_TRY(reserve_arena(&memory->token_copies, arenas.token_copies, "token copies of a plan"));
  SLUICE_TRY(reserve_arena(&memory->node_copies, arenas.node_copies, "node copies of a plan"));
  const sluice_device_t* device = context->device;
  if (device->vtable->reserve != NULL) {
    SLUICE_TRY(device->vtable->reserve(context->device, sluice_template_max_ops(plan->max_chunks, plan->two_levels)));
  }
  return sluice_plans_by_size_begin(&moe->plans);
}

void sluice_plan_take(sluice_moe_t* moe, int32_t number) {
  const sluice_plan_set_t* set = moe->plans->of[sluice_plan_number_size(number)];
  moe->plan = &set->plans[sluice_plan_number_plan(number)];
  moe->plan_number = (uint8_t)number;
}

sluice_status_t sluice_plan_install(sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  sluice_context_t* context = moe->context;
  const limits_t before = limits_of(context);
  sluice_capacity_forget_agreed(moe);
  set_limits(context, (limits_t){plan->inputs.budget, plan->inputs.host_budget, plan->inputs.max_outstanding});
  sluice_status_t status = reserve(moe, plan);
  if (status != SLUICE_OK) {
    set_limits(context, before);
    return status;
  }
  moe->plans->of[0]->count = 1;
  moe->plans->of[0]->plans[0] = *plan;
  sluice_plan_take(moe, 0);
  sluice_layer_choose_mode(moe);
  return SLUICE_OK;
}

static sluice_status_t install_all(sluice_moe_t* moe, const sluice_plan_set_t* set) {
  for (int32_t i = set->count - 1; i >= 0; --i) SLUICE_TRY(sluice_plan_install(moe, &set->plans[i]));
  *moe->plans->of[0] = *set;
  sluice_replay_forget(&moe->replay);
  return SLUICE_OK;
}

/* Replaces a set. Frees memory first: plans for smaller batches may have had more room than larger ones count. */
static sluice_status_t install_instead(sluice_moe_t* moe, const sluice_plan_set_t* set) {
  const sluice_plan_set_t before = *moe->plans->of[0];
  sluice_engine_give_back(moe->context);
  const sluice_status_t status = install_all(moe, set);
  if (status == SLUICE_OK) return SLUICE_OK;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  sluice_engine_give_back(moe->context);
  (void)install_all(moe, &before); /* smaller batches keep their plans */
  return sluice_error_adopt(&why);
}

sluice_status_t sluice_plan_install_set(sluice_moe_t* moe, const sluice_plan_set_t* set) {
  const int has_plans = moe->plans != NULL && moe->plans->of[0] != NULL && moe->plans->of[0]->count > 0;
  return has_plans ? install_instead(moe, set) : install_all(moe, set);
}
