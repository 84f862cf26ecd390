/* As many rows as there are, in chunks of equal sizes: bound before the header, which carries their counts. */
#include "backend/moe/handshake/failure.h"
#include "backend/moe/routing/routes.h"
#include "backend/moe/run/capture.h"
#include "backend/moe/run/mode.h"
#include "backend/moe/run/replay_role.h"

/* The header will. */
static sluice_status_t tell_failure(const sluice_moe_t* moe) {
  (void)moe;
  return SLUICE_OK;
}

/* Nothing but open sees a capture. */
static sluice_status_t check_capture(const sluice_pass_t* pass) {
  (void)pass;
  return SLUICE_OK;
}

static sluice_status_t agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                             sluice_handshake_t* out_handshake) {
  const int has_counts = proposal->direction == SLUICE_FORWARD && proposal->local_status == SLUICE_OK;
  return sluice_handshake(pass->moe, proposal, has_counts ? &pass->binding : NULL, out_handshake);
}

static sluice_status_t fail(const sluice_pass_t* pass, sluice_status_t status) {
  return sluice_fail_pass(pass->context, status, pass->is_complete);
}

static void close(const sluice_pass_t* pass, sluice_status_t status) { (void)pass, (void)status; }

static sluice_status_t bind_alone(sluice_forward_t* f) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(sluice_capture_refuse(&f->pass));
  SLUICE_TRY(moe->strategies->routes->order(moe, f->pass.stream, f->args->expert_ids, f->num_chunks, &f->pass.binding));
  return sluice_forward_choose_by_config(f, f->num_chunks);
}

/* A repetition's n is still to be found, and its schedule with it. */
static void propose(const sluice_forward_t* f, sluice_proposal_t* proposal) {
  const int is_known = proposal->local_status == SLUICE_OK && !f->role->is_repetition;
  proposal->num_chunks = f->num_chunks;
  proposal->comm_hash = is_known ? sluice_pass_comm_hash(&f->pass) : (uint64_t)sluice_forward_keeps(f);
}

static sluice_status_t take_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                 const sluice_replay_forward_t* repeated) {
  (void)f, (void)handshake, (void)repeated;
  return SLUICE_OK;
}

/* Some rank had bound another number of chunks than the repeated forward had. */
static sluice_status_t bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  if (handshake->is_uncounted) {
    f->num_chunks = handshake->num_chunks;
    SLUICE_TRY(bind_alone(f));
    SLUICE_TRY(sluice_exchange_counts(&f->pass.binding));
  }
  f->pass.binding.wgrad_mode = (uint8_t)f->wgrad_mode;
  return SLUICE_OK;
}

static int32_t wgrad_mode(const sluice_moe_t* moe, const sluice_binding_t* binding) {
  (void)moe;
  return binding->wgrad_mode;
}

static sluice_status_t check_halves(sluice_pass_t* pass) {
  (void)pass;
  return SLUICE_OK;
}

static void note_alone(const sluice_pass_t* pass) { (void)pass; }

const sluice_mode_t sluice_mode_exact = {.tell_failure = tell_failure,
                                         .open = sluice_capture_refuse,
                                         .check_capture = check_capture,
                                         .agree = agree,
                                         .fail = fail,
                                         .close = close,
                                         .bind_alone = bind_alone,
                                         .propose = propose,
                                         .take_plan = take_plan,
                                         .bind = bind,
                                         .wgrad_mode = wgrad_mode,
                                         .check_halves = check_halves,
                                         .note_alone = note_alone};
