// SPDX-License-Identifier: Apache-2.0
/* A backward: from the routes that its forward saved to the gradients. */
#include "backend/base/pages_prefault.h"
#include "backend/moe/handshake/handshake.h"
#include "backend/moe/ops/low_rank.h"
#include "backend/moe/pass/lanes.h"
#include "backend/moe/routing/saved_routes.h"
#include "backend/moe/run/forward_call.h"
#include "backend/moe/run/mode.h"
#include "backend/moe/run/planned_forward.h"

/* The weight gradients that this rank wants. Others may want some if this one wants none (frozen experts). */
static int32_t wanted_wgrad(const sluice_moe_t* moe, const sluice_moe_backward_args_t* args) {
  if (!(args->parts & SLUICE_BACKWARD_WGRAD)) return SLUICE_WGRAD_CALL_LATER;
  const int is_wanted = args->grad_params != NULL || moe->shape.config.callback_experts;
  return is_wanted ? SLUICE_WGRAD_CALL_NOW : SLUICE_WGRAD_CALL_NONE;
}

/* Whether gradients are sent before rows are dispatched again. On a device kernels of both lanes share the SMs and
 * exchanges need few, so rows that only weight gradients read can arrive while experts compute. Under a plan ranks may
 * recompute different tensors, so that all of them keep the order that suits a recomputation. */
static int sends_for_experts_first(const sluice_pass_t* pass, const sluice_template_spec_t* spec) {
  const sluice_moe_t* moe = pass->moe;
  if (!sluice_pass_lanes(pass)->are_streams || sluice_is_planned(moe) || spec->single_rank) return 0;
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    if (sluice_restore_is_computed_again(spec->restore_pre_activation[i])) return 0;
  }
  return 1;
}

static sluice_template_spec_t spec_of(const sluice_pass_t* pass, const sluice_step_t* step,
                                      const sluice_moe_backward_args_t* args, int32_t wgrad) {
  const sluice_moe_t* moe = pass->moe;
  sluice_template_spec_t spec = sluice_run_spec(pass, SLUICE_BACKWARD, 0);
  spec.dgrad = (args->parts & SLUICE_BACKWARD_DGRAD) != 0;
  spec.wgrad = wgrad;
  spec.wgrad_mode = sluice_planned_wgrad_mode(moe, &pass->binding);
  spec.experts_first = sends_for_experts_first(pass, &spec);
  spec.reuse_saved = step->state == SLUICE_STEP_DGRAD_DONE
                         ? step->reuses_saved
                         : !moe->shape.config.callback_experts && args->may_reuse_saved;
  return spec;
}

static sluice_status_t check_adapters(const sluice_pass_t* pass, const sluice_expert_tensors_t* params) {
  if (params == NULL || pass->binding.adapters == sluice_low_signature(params)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "layer %d: params has other adapters than this step's forward (another set, rank or scale): pass "
                     "the adapters of the forward",
                     pass->moe->shape.config.layer_id);
}

/* The steps that need no other rank. */
static sluice_status_t bind_alone(sluice_pass_t* pass, sluice_step_t* step, const sluice_moe_backward_args_t* args) {
  sluice_moe_t* moe = pass->moe;
  SLUICE_TRY(moe->mode->open(pass));
  SLUICE_TRY(sluice_binding_restore(moe, pass->stream, step->saved[SLUICE_SAVED_META],
                                    step->saved_bytes[SLUICE_SAVED_META], step->saved[SLUICE_SAVED_INPUT],
                                    &pass->binding));
  SLUICE_TRY(check_adapters(pass, args->params));
  sluice_run_take_travel(pass);
  /* A pass with weight gradients has another order of exchanges, so ranks compare that pass, and a rank that wants none
   * runs it for the others. */
  int32_t wgrad = wanted_wgrad(moe, args);
  if (moe->context->world_size > 1 && wgrad == SLUICE_WGRAD_CALL_NONE) wgrad = SLUICE_WGRAD_CALL_NOW;
  const sluice_template_spec_t spec = spec_of(pass, step, args, wgrad);
  SLUICE_TRY(sluice_engine_template(moe->context, &spec, &pass->schedule));
  SLUICE_TRY(sluice_mode_check_capture(pass));
  step->is_captured |= pass->captured != 0;
  SLUICE_TRY(sluice_planned_check_pass(pass));
  /* The token counts of the step are known only now. */
  if (spec.dgrad && args->grad_out->shape[0] != pass->binding.num_tokens) {
    return SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT, "layer %d: grad_out has %lld rows, but this step's forward had %lld tokens",
        moe->shape.config.layer_id, (long long)args->grad_out->shape[0], (long long)pass->binding.num_tokens);
  }
  return SLUICE_OK;
}

/* Takes the template without weight gradients, which holds fewer rows, if no rank wants any. */
static sluice_status_t leave_wgrad_out(sluice_pass_t* pass, const sluice_step_t* step,
                                       const sluice_moe_backward_args_t* args) {
  const sluice_template_spec_t spec = spec_of(pass, step, args, SLUICE_WGRAD_CALL_NONE);
  return sluice_engine_template(pass->context, &spec, &pass->schedule);
}

/* Gradient rows that outlive this call belong to the step. */
static sluice_status_t allocate_deferred(const sluice_pass_t* pass, sluice_step_t* step) {
  uint64_t bytes[SLUICE_NUM_DEFERRED];
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) bytes[i] = pass->slots[sluice_deferred_tensors[i]].bytes;
  return sluice_step_allocate_deferred(step, bytes, pass->stream);
}

/* Gradients are often as large as the parameters, and their memory is often fresh, in a first step or in each. Weight
 * gradients are written last. */
static void advise_outputs(const sluice_pass_t* pass, int32_t num_local, sluice_pages_prefault_t* ahead) {
  const sluice_row_memory_t* rows = pass->context->rows;
  sluice_rows_advise(rows, pass->out_rows);
  const sluice_expert_tensors_t* dw = pass->grad_params;
  if (dw == NULL || pass->grad_mode != SLUICE_GRAD_OVERWRITE) return;
  const sluice_tensor_t* const up[] = {dw->w1, dw->w3};
  sluice_rows_advise_slices(rows, up, 2, num_local, ahead);
  sluice_rows_advise_slices(rows, &dw->w2, 1, num_local, ahead);
}

static sluice_status_t execute(sluice_pass_t* pass, sluice_step_t* step, const sluice_moe_backward_args_t* args) {
  void* given[SLUICE_T_COUNT] = {NULL};
  sluice_binding_starts(&pass->host);
  if (pass->leaves_wgrad_out) SLUICE_TRY(leave_wgrad_out(pass, step, args));
  sluice_step_give_saved(step, &pass->binding, given);
  pass->grad_params = args->grad_params;
  SLUICE_TRY(sluice_pass_measure(pass));
  if (pass->schedule->spec.wgrad == SLUICE_WGRAD_CALL_LATER) SLUICE_TRY(allocate_deferred(pass, step));
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i)
    given[sluice_deferred_tensors[i]] = step->deferred[sluice_deferred_tensors[i]];
  SLUICE_TRY(sluice_pass_prepare(pass, given));
  pass->params = args->params;
  pass->callbacks = args->callbacks;
  pass->tokens = args->tokens;
  pass->in_rows = args->grad_out;
  pass->out_rows = args->grad_tokens;
  pass->route_weights = args->route_weights;
  pass->grad_route_weights = args->grad_route_weights;
  pass->grad_mode = args->grad_mode;
  pass->expert_ready = args->expert_ready;
  pass->expert_ready_user = args->expert_ready_user;
  sluice_pages_prefault_t ahead;
  sluice_pages_prefault_init(&ahead);
  advise_outputs(pass, step->moe->shape.num_local, &ahead);
  sluice_binding_stops(&pass->host);
  /* Nothing was written so far: until here the step can be tried again. */
  step->reuses_saved = pass->schedule->spec.reuse_saved;
  if (step->reuses_saved) sluice_binding_use_up(step->saved[SLUICE_SAVED_META]);
  sluice_pages_prefault_start(&ahead);
  const sluice_status_t status = sluice_pass_run(pass);
  sluice_pages_prefault_stop(&ahead); /* then the caller may free the memory */
  return status;
}

static sluice_status_t check_state(const sluice_step_t* step, int32_t parts) {
  if (step->state == SLUICE_STEP_FRESH && parts != SLUICE_BACKWARD_WGRAD) return sluice_step_check_saved(step);
  if (step->state == SLUICE_STEP_DGRAD_DONE && parts == SLUICE_BACKWARD_WGRAD) return SLUICE_OK;
  static const char* const done[] = {"has not run dgrad yet; run it first", "has run dgrad already; only wgrad is left",
                                     "has run its backward already"};
  return SLUICE_FAIL(SLUICE_E_STATE, "layer %d: this step %s", step->moe->shape.config.layer_id, done[step->state]);
}

static void advance(sluice_step_t* step, int32_t parts) {
  step->state = parts == SLUICE_BACKWARD_DGRAD ? SLUICE_STEP_DGRAD_DONE : SLUICE_STEP_DONE;
  if (step->state != SLUICE_STEP_DONE) return;
  sluice_step_free_deferred(step);
  sluice_replay_end(&step->moe->replay);
}

static sluice_status_t agree(sluice_pass_t* pass, const sluice_moe_backward_args_t* args, sluice_status_t refusal,
                             const char* text) {
  const sluice_proposal_t proposal = {
      .direction = SLUICE_BACKWARD,
      .num_chunks = refusal == SLUICE_OK ? pass->binding.num_chunks : 0,
      .comm_hash = refusal == SLUICE_OK ? sluice_pass_comm_hash(pass) : 0,
      .wishes = refusal == SLUICE_OK
                    ? (args->parts & SLUICE_BACKWARD_DGRAD) | wanted_wgrad(pass->moe, args) << SLUICE_WISH_WGRAD
                    : 0,
      .num_tokens = refusal == SLUICE_OK ? pass->binding.num_tokens : 0,
      .local_status = refusal,
      .local_message = text,
  };
  sluice_handshake_t handshake;
  SLUICE_TRY(pass->moe->mode->agree(pass, &proposal, &handshake));
  pass->agreed_ns = handshake.agreed_ns;
  pass->header_ns = handshake.header_ns;
  pass->leaves_wgrad_out = !handshake.wants_wgrad;
  return SLUICE_OK;
}

/* The collective part, up to the last refusal of any rank. */
static sluice_status_t open_collective(sluice_pass_t* pass, sluice_step_t* step, const sluice_moe_backward_args_t* args,
                                       sluice_status_t refusal) {
  sluice_context_t* context = pass->context;
  char text[256] = "";
  SLUICE_TRY(sluice_mode_tell_failure(pass->moe));
  refusal = sluice_take_refusal(context, refusal, text, sizeof text);
  sluice_status_t status = refusal;
  if (status == SLUICE_OK) status = check_state(step, args->parts);
  if (status == SLUICE_OK) status = bind_alone(pass, step, args);
  sluice_binding_stops(&pass->host);
  if (refusal == SLUICE_OK && status != SLUICE_OK) status = sluice_take_refusal(context, status, text, sizeof text);
  return agree(pass, args, status, text);
}

/* wgrad alone involves no other rank. */
static sluice_status_t open_alone(sluice_pass_t* pass, sluice_step_t* step, const sluice_moe_backward_args_t* args,
                                  sluice_status_t refusal) {
  sluice_status_t status = refusal;
  if (status == SLUICE_OK) status = check_state(step, args->parts);
  if (status == SLUICE_OK) status = bind_alone(pass, step, args);
  sluice_binding_stops(&pass->host);
  if (status == SLUICE_OK) sluice_mode_note_alone(pass);
  return status;
}

static sluice_status_t run(sluice_pass_t* pass, sluice_step_t* step, const sluice_moe_backward_args_t* args,
                           sluice_status_t refusal) {
  const int is_collective = args->parts != SLUICE_BACKWARD_WGRAD;
  sluice_binding_starts(&pass->host);
  SLUICE_TRY((is_collective ? open_collective : open_alone)(pass, step, args, refusal));
  sluice_status_t status = execute(pass, step, args);
  if (status == SLUICE_OK) return SLUICE_OK;
  if (is_collective) status = pass->moe->mode->fail(pass, status);
  if (step->state == SLUICE_STEP_FRESH) sluice_step_free_deferred(step);
  return status;
}

sluice_status_t sluice_run_backward(sluice_moe_t* moe, sluice_step_t* step, const sluice_moe_backward_args_t* args,
                                    sluice_stream_t stream, sluice_status_t refusal) {
  sluice_pass_t pass = sluice_run_pass(moe, SLUICE_BACKWARD, stream);
  sluice_status_t status = run(&pass, step, args, refusal);
  sluice_mode_close(&pass, status);
  if (status == SLUICE_OK) advance(step, args->parts);
  return status;
}
