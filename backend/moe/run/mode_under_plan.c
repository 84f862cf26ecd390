// SPDX-License-Identifier: Apache-2.0
/* Mode under a plan: ids are read before the header, which carries the largest T and the bytes that ranks hold.
 * Afterwards chunks are cut by received rows, and counts are exchanged. */
#include "backend/moe/routing/routes.h"
#include "backend/moe/run/capture.h"
#include "backend/moe/run/forward_call.h"
#include "backend/moe/run/mode_steps.h"
#include "backend/moe/run/planned_forward.h"

static sluice_status_t agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                             sluice_handshake_t* out_handshake) {
  return sluice_handshake(pass->moe, proposal, NULL, out_handshake);
}

static sluice_status_t bind_alone(sluice_forward_t* f) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(sluice_capture_refuse(&f->pass));
  return moe->strategies->routes->look(moe, f->pass.memory, f->pass.stream, f->args->expert_ids, &f->counts);
}

static sluice_status_t take_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                 const sluice_replay_forward_t* repeated) {
  SLUICE_TRY(sluice_planned_take(f, handshake, repeated));
  if (!sluice_forward_keeps(f)) return SLUICE_OK;
  return sluice_planned_check_room(f->pass.moe, handshake->held_bytes, handshake->held_pool_bytes);
}

static sluice_status_t bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  (void)handshake;
  SLUICE_TRY(sluice_planned_bind(f->pass.moe, f->pass.stream, f->args->expert_ids, f->counts, sluice_forward_keeps(f),
                                 &f->pass.binding));
  sluice_run_take_travel(&f->pass);
  return sluice_forward_take_template(f);
}

const sluice_mode_t sluice_mode_under_plan = {.is_bounded = 1,
                                              .open = sluice_capture_refuse,
                                              .agree = agree,
                                              .fail = sluice_mode_fail_by_header,
                                              .bind_alone = bind_alone,
                                              .propose = sluice_planned_propose,
                                              .take_plan = take_plan,
                                              .bind = bind};
