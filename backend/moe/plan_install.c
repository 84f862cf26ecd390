/* A plan in force: everything it fixes is allocated, the rest has its limits. */
#include "backend/moe/plan_sizes.h"

#include "backend/moe/ceiling.h"
#include "backend/moe/pass.h"

/* What the allocator and the host pool refuse beyond. */
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
  sluice_device_t* device = context->device;
  if (device->far != NULL) device->far->limit_pinned(device, limits.pool);
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
  sluice_ceiling_forget_agreed(moe);
  sluice_free(sluice_process_allocator(), moe->plans, sizeof *moe->plans);
  moe->plans = NULL;
  moe->plan = NULL;
  moe->plan_is_given = 0;
  sluice_plan_lift_limits(moe);
}

static sluice_status_t reserve(sluice_moe_t* layer, const sluice_plan_data_t* plan) {
  sluice_moe_t widest = *layer;
  widest.num_local = sluice_plan_most_local(layer);
  const sluice_moe_t* moe = &widest;
  sluice_context_t* context = layer->context;
  if (sluice_is_far(layer)) {
    const uint64_t parcels = sluice_plan_far_parcels_bytes(moe, plan);
    SLUICE_TRY(sluice_arena_reserve(&context->routes, plan->bytes.routing - parcels, "routes of a plan"));
    if (parcels > 0) SLUICE_TRY(sluice_arena_reserve(&context->far_parcels, parcels, "parcels of a plan"));
  }
  SLUICE_TRY(sluice_engine_reserve_templates(context, plan->max_chunks));
  SLUICE_TRY(sluice_arena_reserve(&context->slots, plan->bytes.slots, "slots of a plan"));
  SLUICE_TRY(
      sluice_arena_reserve(&context->binding, sluice_plan_routing_bytes(moe, plan), "routes and offsets of a plan"));
  SLUICE_TRY(sluice_arena_reserve(&context->layout, sluice_plan_layout_bytes(plan), "places of slots of a plan"));
  if (sluice_plan_cut_bytes(moe, plan) > 0) {
    SLUICE_TRY(sluice_arena_reserve(&context->cut, sluice_plan_cut_bytes(moe, plan), "rows by block of a plan"));
  }
  if (!sluice_is_far(layer) && sluice_plan_parcels_bytes(moe, plan) > 0) {
    SLUICE_TRY(sluice_arena_reserve(&context->parcels, sluice_plan_parcels_bytes(moe, plan), "parcels of a plan"));
  }
  const sluice_device_t* device = context->device;
  if (device->vtable->reserve != NULL) {
    SLUICE_TRY(device->vtable->reserve(context->device, sluice_template_max_ops(plan->max_chunks)));
  }
  if (layer->plans == NULL) layer->plans = sluice_alloc(sluice_process_allocator(), sizeof *layer->plans, "plans");
  return layer->plans == NULL ? sluice_alloc_status() : SLUICE_OK;
}

sluice_status_t sluice_plan_install(sluice_moe_t* layer, const sluice_plan_data_t* plan) {
  sluice_context_t* context = layer->context;
  const limits_t before = limits_of(context);
  sluice_ceiling_forget_agreed(layer);
  set_limits(context, (limits_t){plan->inputs.budget, plan->inputs.host_budget, plan->inputs.max_outstanding});
  sluice_status_t status = reserve(layer, plan);
  if (status != SLUICE_OK) {
    set_limits(context, before);
    return status;
  }
  layer->plans->count = 1;
  layer->plans->plans[0] = *plan;
  layer->plan = layer->plans->plans;
  return SLUICE_OK;
}
