/* A plan in force: everything it fixes is allocated, the rest has its limits. */
#include "backend/moe/plan_sizes.h"

#include "backend/moe/ceiling.h"
#include "backend/moe/pass.h"

void sluice_plan_remove(sluice_moe_t* moe) {
  sluice_ceiling_forget_agreed(moe);
  sluice_free(sluice_process_allocator(), moe->plans, sizeof *moe->plans);
  moe->plans = NULL;
  moe->plan = NULL;
  moe->plan_is_given = 0;
}

sluice_status_t sluice_plan_install(sluice_moe_t* layer, const sluice_plan_data_t* plan) {
  sluice_moe_t widest = *layer;
  widest.num_local = sluice_plan_most_local(layer);
  const sluice_moe_t* moe = &widest;
  sluice_context_t* context = layer->context;
  sluice_ceiling_forget_agreed(layer);
  context->memory->limit = plan->inputs.budget;
  context->ledger.pool_limit = plan->inputs.host_budget;
  context->planned_outstanding = plan->inputs.max_outstanding;
  if (sluice_is_far(layer)) {
    context->device->far->limit_pinned(context->device, plan->inputs.host_budget);
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
  if (layer->plans == NULL) return sluice_alloc_status();
  layer->plans->count = 1;
  layer->plans->plans[0] = *plan;
  layer->plan = layer->plans->plans;
  return SLUICE_OK;
}
