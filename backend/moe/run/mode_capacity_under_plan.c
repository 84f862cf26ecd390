// SPDX-License-Identifier: Apache-2.0
/* Capacity mode under a plan, which chooses only policies. Calls need no header while the plan stays the same. All
 * ranks have the same plan, so the refusals before the header are the same on all ranks. */
#include "backend/moe/routing/routes.h"
#include "backend/moe/run/capture.h"
#include "backend/moe/run/capacity.h"
#include "backend/moe/run/mode.h"
#include "backend/moe/run/planned_forward.h"

static sluice_status_t choose_template(sluice_forward_t* f, int32_t num_chunks) {
  const sluice_plan_data_t* plan = f->pass.moe->plan;
  SLUICE_TRY(sluice_forward_choose_template(f, num_chunks, plan->restore_input, plan->restore_pre_activation,
                                            &plan->inputs.policies));
  sluice_planned_note(f->pass.moe, &f->pass.binding);
  return SLUICE_OK;
}

static sluice_status_t check_tokens(const sluice_forward_t* f) {
  const sluice_moe_t* moe = f->pass.moe;
  int64_t tokens = f->args->expert_ids->shape[0], most = moe->plan->inputs.max_tokens;
  if (tokens <= most) return SLUICE_OK;
  return SLUICE_FAIL(
      SLUICE_E_OVER_BUDGET,
      "layer %d: %lld tokens, but the plan that the ranks agreed on under a capacity is for at most %lld: pass at most "
      "this many, run the largest batch first, or create a plan for more (sluice_plan_create)",
      moe->shape.config.layer_id, (long long)tokens, (long long)most);
}

static sluice_status_t bind_alone(sluice_forward_t* f) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(sluice_capture_open(&f->pass));
  SLUICE_TRY(moe->strategies->routes->check(moe, f->args->expert_ids));
  if (moe->plan != NULL) SLUICE_TRY(choose_template(f, f->choice.num_chunks));
  SLUICE_TRY(sluice_capacity_check_capture(&f->pass));
  if (moe->plan == NULL) return SLUICE_OK; /* made after the header */
  if (sluice_capacity_is_agreed(moe, f->pass.schedule)) return check_tokens(f);
  f->pass.schedule = NULL; /* the header determines whether the plan is large enough */
  return SLUICE_OK;
}

/* Without a header, room is judged by the plans' promises: equal on all ranks, and at least the bytes held. */
static sluice_status_t take_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                 const sluice_replay_forward_t* repeated) {
  SLUICE_TRY(sluice_planned_take(f, handshake, repeated));
  if (!sluice_forward_keeps(f)) return SLUICE_OK;
  const sluice_ledger_sums_t sums = sluice_ledger_sums(&f->pass.context->ledger);
  return sluice_planned_check_room(f->pass.moe, sums.promised, sums.promised_pool);
}

static sluice_status_t bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  (void)handshake;
  SLUICE_TRY(sluice_capacity_bind(&f->pass, f->args->expert_ids, f->choice.num_chunks));
  SLUICE_TRY(choose_template(f, f->choice.num_chunks));
  sluice_capacity_note_agreed(&f->pass);
  return SLUICE_OK;
}

const sluice_mode_t sluice_mode_capacity_under_plan = {.is_bounded = 1,
                                                       .tell_failure = sluice_capacity_tell_failure,
                                                       .open = sluice_capture_open,
                                                       .check_capture = sluice_capacity_check_capture,
                                                       .agree = sluice_capacity_agree,
                                                       .fail = sluice_capacity_fail,
                                                       .close = sluice_capacity_close,
                                                       .bind_alone = bind_alone,
                                                       .propose = sluice_planned_propose,
                                                       .take_plan = take_plan,
                                                       .bind = bind,
                                                       .note_alone = sluice_capacity_note_agreed};
