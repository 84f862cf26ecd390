/* Under a plan: ids are looked at before the header, which brings the largest T and what ranks hold; chunks are cut by
 * received rows behind it, and counts follow. */
#include "backend/moe/handshake/failure.h"
#include "backend/moe/routing/routes.h"
#include "backend/moe/run/capture.h"
#include "backend/moe/run/mode.h"
#include "backend/moe/run/planned.h"

static sluice_status_t tell_failure(const sluice_moe_t* moe) {
  (void)moe;
  return SLUICE_OK;
}

static sluice_status_t check_capture(const sluice_pass_t* pass) {
  (void)pass;
  return SLUICE_OK;
}

static sluice_status_t agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                             sluice_handshake_t* out_handshake) {
  return sluice_handshake(pass->moe, proposal, NULL, out_handshake);
}

static sluice_status_t fail(const sluice_pass_t* pass, sluice_status_t status) {
  return sluice_fail_pass(pass->context, status, pass->is_complete);
}

static void close(const sluice_pass_t* pass, sluice_status_t status) { (void)pass, (void)status; }

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
  return sluice_forward_take_template(f);
}

static void note_alone(const sluice_pass_t* pass) { (void)pass; }

const sluice_mode_t sluice_mode_under_plan = {.is_bounded = 1,
                                              .tell_failure = tell_failure,
                                              .open = sluice_capture_refuse,
                                              .check_capture = check_capture,
                                              .agree = agree,
                                              .fail = fail,
                                              .close = close,
                                              .bind_alone = bind_alone,
                                              .propose = sluice_planned_propose,
                                              .take_plan = take_plan,
                                              .bind = bind,
                                              .wgrad_mode = sluice_planned_wgrad_mode,
                                              .check_halves = sluice_planned_check_pass,
                                              .note_alone = note_alone};
