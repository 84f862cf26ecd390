// SPDX-License-Identifier: Apache-2.0
#include "backend/plan/plans_by_size.h"

#include "backend/base/alloc.h"
#include "backend/base/math.h"
#include "backend/model/pass_sizes.h"

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
  if (*inout_plans == NULL)
    *inout_plans = sluice_alloc_zeroed(sluice_process_allocator(), sizeof **inout_plans, "plans");
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

uint64_t sluice_plans_most_block_bytes(const sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem,
                                       int is_offloaded) {
  const int32_t input = is_offloaded ? SLUICE_SAVED_HOST_INPUT : SLUICE_SAVED_INPUT;
  const int32_t pre_activation = is_offloaded ? SLUICE_SAVED_HOST_PRE_ACTIVATION : SLUICE_SAVED_PRE_ACTIVATION;
  uint64_t most = 0;
  for (int32_t size = 0; size < SLUICE_PLAN_SIZES; ++size) {
    const sluice_plan_set_t* set = plans->of[size];
    for (int32_t i = 0; set != NULL && i < set->count; ++i) {
      const uint64_t bytes = sluice_align_up(sluice_plan_block_bytes(problem, &set->plans[i], input)) +
                             sluice_align_up(sluice_plan_block_bytes(problem, &set->plans[i], pre_activation));
      most = sluice_max_u64(most, bytes);
    }
  }
  return most;
}

/* ---- adding a size ---- */

/* All plans have the same slots, routing, schedules and GEMMs: those of the plan that needs most. */
static sluice_plan_room_t room_of(const sluice_plan_set_t* largest) {
  sluice_plan_room_t room = {.shared = largest->plans[0].bytes};
  for (int32_t i = 0; i < largest->count; ++i) {
    if (largest->plans[i].max_chunks > room.max_chunks) room.max_chunks = largest->plans[i].max_chunks;
  }
  return room;
}

sluice_status_t sluice_plans_by_size_add(sluice_plans_by_size_t* plans, const sluice_plan_problem_t* problem,
                                         const sluice_plan_rates_t* rates, int32_t most, int32_t size) {
  const sluice_plan_room_t room = room_of(plans->of[0]);
  sluice_plan_problem_t within = *problem;
  within.room = &room;
  sluice_plan_inputs_t inputs = plans->of[0]->plans[0].inputs;
  inputs.max_tokens = sluice_plan_size_tokens(inputs.max_tokens, size);
  plans->of[size] = new_set();
  if (plans->of[size] == NULL) return sluice_alloc_status();
  const sluice_status_t status = sluice_candidates_make(&within, &inputs, rates, most, plans->of[size]);
  if (status != SLUICE_OK) free_set(plans, size);
  return status;
}
