#include "backend/plan/plans_by_size.h"

#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/math.h"

int64_t sluice_plan_size_tokens(int64_t most_tokens, int32_t size) {
  return sluice_ceil_div(most_tokens, (int64_t)1 << size);
}

int32_t sluice_plan_size(int64_t most_tokens, int64_t num_tokens) {
  int32_t size = 0;
  for (int32_t next = 1; next < SLUICE_PLAN_SIZES; ++next) {
    const int64_t tokens = sluice_plan_size_tokens(most_tokens, next);
    if (num_tokens > tokens || tokens == sluice_plan_size_tokens(most_tokens, size)) break;
    size = next;
  }
  return size;
}

/* ---- sets ---- */

static sluice_plan_set_t* new_set(void) {
  return sluice_alloc_zeroed(sluice_process_allocator(), sizeof(sluice_plan_set_t), "plans of a size");
}

static void free_set(sluice_plans_by_size_t* plans, int32_t size) {
  sluice_free(sluice_process_allocator(), plans->of[size], sizeof *plans->of[size]);
  plans->of[size] = NULL;
}

sluice_status_t sluice_plans_by_size_begin(sluice_plans_by_size_t** inout_plans) {
  if (*inout_plans == NULL) *inout_plans = sluice_alloc_zeroed(sluice_process_allocator(), sizeof **inout_plans, "plans");
  sluice_plans_by_size_t* plans = *inout_plans;
  if (plans != NULL && plans->of[0] == NULL) plans->of[0] = new_set();
  if (plans == NULL || plans->of[0] == NULL) return sluice_alloc_status();
  for (int32_t size = 1; size < SLUICE_PLAN_SIZES; ++size) free_set(plans, size);
  return SLUICE_OK;
}

void sluice_plans_by_size_free(sluice_plans_by_size_t* plans) {
  if (plans == NULL) return;
  for (int32_t size = 0; size < SLUICE_PLAN_SIZES; ++size) free_set(plans, size);
  sluice_free(sluice_process_allocator(), plans, sizeof *plans);
}

/* ---- one more size ---- */

/* Bytes that slots may grow by, so that max_outstanding steps of the plan keep their room, and one more beside those
 * that are outstanding now, which may be more. */
static uint64_t spare_bytes(const sluice_plan_data_t* plan, uint64_t held) {
  const sluice_plan_bytes_t* b = &plan->bytes;
  const uint64_t budget = plan->inputs.budget, steps = (uint64_t)plan->inputs.max_outstanding * b->step;
  const uint64_t taken = b->total - steps + sluice_max_u64(steps, held + b->step);
  if (budget == 0) return UINT64_MAX - b->slots;
  return budget > taken ? budget - taken : 0;
}

/* All have the same slots, routing, schedules and GEMMs, those of the one that needs most. */
static sluice_plan_room_t room_beside(const sluice_plans_by_size_t* plans, uint64_t held) {
  sluice_plan_room_t room = {.shared = plans->of[0]->plans[0].bytes, .most_slots = UINT64_MAX};
  for (int32_t size = 0; size < SLUICE_PLAN_SIZES; ++size) {
    const sluice_plan_set_t* set = plans->of[size];
    for (int32_t i = 0; set != NULL && i < set->count; ++i) {
      const sluice_plan_data_t* plan = &set->plans[i];
      const uint64_t most = plan->bytes.slots + spare_bytes(plan, held);
      if (plan->max_chunks > room.max_chunks) room.max_chunks = plan->max_chunks;
      if (most < room.most_slots) room.most_slots = most;
    }
  }
  return room;
}

static void lift_slots(sluice_plans_by_size_t* plans, uint64_t slots) {
  for (int32_t size = 0; size < SLUICE_PLAN_SIZES; ++size) {
    sluice_plan_set_t* set = plans->of[size];
    for (int32_t i = 0; set != NULL && i < set->count; ++i) {
      sluice_plan_bytes_t* b = &set->plans[i].bytes;
      if (b->slots >= slots) continue;
      b->total += slots - b->slots;
      b->slots = slots;
    }
  }
}

sluice_status_t sluice_plans_by_size_add(sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem,
                                         const sluice_plan_rates_t* rates, int32_t most, int32_t size,
                                         uint64_t held, uint64_t* out_slots) {
  const sluice_plan_data_t* largest = &plans->of[0]->plans[0];
  const sluice_plan_room_t room = room_beside(plans, held);
  *out_slots = room.shared.slots;
  sluice_plan_problem_t beside = *problem;
  beside.room = &room;
  sluice_plan_inputs_t inputs = largest->inputs;
  inputs.max_tokens = sluice_plan_size_tokens(largest->inputs.max_tokens, size);
  sluice_plan_set_t* set = new_set();
  if (set == NULL) return sluice_alloc_status();
  const sluice_status_t status = sluice_candidates_make(&beside, &inputs, rates, most, set);
  plans->of[size] = set;
  if (status != SLUICE_OK) {
    free_set(plans, size);
    return status;
  }
  for (int32_t i = 0; i < set->count; ++i) *out_slots = sluice_max_u64(*out_slots, set->plans[i].bytes.slots);
  lift_slots(plans, *out_slots);
  return SLUICE_OK;
}
