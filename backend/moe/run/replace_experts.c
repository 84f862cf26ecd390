// SPDX-License-Identifier: Apache-2.0
/* Replaces the placement of a layer's experts, on all ranks or on none. */
#include "backend/moe/run/run.h"

#include "backend/moe/handshake/handshake.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/layer/placement.h"
#include "backend/moe/run/active_plan.h"
#include "backend/moe/step/step.h"

static int is_of_layer(const void* step, const void* moe) { return ((const sluice_step_t*)step)->moe == moe; }

static int keeps_numbers(const sluice_moe_t* moe, const sluice_expert_placement_t* placement) {
  return sluice_placement_has_numbers(placement, moe->shape.config.num_experts, moe->context->world_size,
                                      moe->first_position);
}

/* A backward, and buffers of a future step, need the tables of their forward. */
static sluice_status_t check_steps(sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  if (!sluice_live_steps_any(&context->live_steps, is_of_layer, moe) && !sluice_ledger_has(&context->ledger, moe))
    return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "layer %d: steps of this layer are outstanding: run their backward and drop them, and free what "
                     "they saved, before experts are replaced",
                     moe->shape.config.layer_id);
}

/* Refuses other numbers of experts on ranks if the library cannot make the memory that depends on them again. */
static sluice_status_t check_numbers(const sluice_moe_t* moe) {
  const int32_t id = moe->shape.config.layer_id;
  if (moe->plan_is_given) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "layer %d: the plan set with sluice_moe_use_plan is for other numbers of experts on the ranks: "
                       "unset it before the replacement, and set a new plan afterwards",
                       id);
  }
  if (moe->context->num_captured == 0) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "layer %d: graphs were captured in this context, and their memory may not grow: keep the number "
                     "of experts on each rank, or use another context",
                     id);
}

static sluice_status_t check(sluice_moe_t* moe, const sluice_expert_placement_t* placement) {
  SLUICE_TRY(check_steps(moe));
  return keeps_numbers(moe, placement) ? SLUICE_OK : check_numbers(moe);
}

/* Must not fail, because the other ranks have replaced theirs. */
static void replace(sluice_moe_t* moe, const sluice_expert_placement_t* placement) {
  if (!keeps_numbers(moe, placement)) sluice_plan_remove(moe);
  sluice_layer_place(moe, placement);
  sluice_replay_forget(&moe->replay);
  sluice_capacity_forget_agreed(moe);
}

sluice_status_t sluice_run_replace_experts(sluice_moe_t* moe, const sluice_expert_placement_t* placement,
                                           sluice_status_t refusal) {
  char text[256] = "";
  if (refusal == SLUICE_OK) refusal = check(moe, placement);
  refusal = sluice_take_refusal(moe->context, refusal, text, sizeof text);
  SLUICE_TRY(sluice_placement_agree(moe, placement, refusal, text));
  replace(moe, placement);
  return SLUICE_OK;
}
