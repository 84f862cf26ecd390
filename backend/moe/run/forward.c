// SPDX-License-Identifier: Apache-2.0
/* A forward, from routing to results. The layer's strategies and its mode select the variants. */
#include "backend/moe/handshake/handshake.h"
#include "backend/moe/ops/low_rank.h"
#include "backend/moe/pass/lanes.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/routing/routes.h"
#include "backend/moe/routing/saved_routes.h"
#include "backend/moe/run/mode.h"

/* ---- repeated forwards, while n or the plan is open ---- */

/* A forward that activation checkpointing runs again must produce buffers of the same sizes as the first time, since
 * the host replaces one with the other: the same n and the same plan. So a first forward is recorded (is_noted), and a
 * repetition (repeats) looks it up (layer/replay.h). These functions do nothing for a forward that is neither. */

/* Before the header: finds the forwards with this rank's routing. */
static void look_back(sluice_forward_t* f) {
  const sluice_moe_t* moe = f->pass.moe;
  if (f->repeats || (f->is_noted && sluice_forward_keeps(f)))
    f->routes = sluice_routes_hash(moe->strategies->routes, moe, f->args->expert_ids);
  if (!f->repeats) return;
  sluice_replay_t* kept = &f->pass.moe->replay;
  f->like = sluice_replay_like(kept, f->routes);
  const sluice_replay_forward_t* repeated = sluice_replay_choose(kept, f->like);
  if (repeated == NULL) return;
  f->choice = repeated->choice;
}

/* After the header: the forward that this one repeats on all ranks, whose choice it takes; NULL: none. */
static const sluice_replay_forward_t* take_repeated(sluice_forward_t* f, uint32_t like) {
  sluice_replay_forward_t* repeated = f->repeats ? sluice_replay_choose(&f->pass.moe->replay, like) : NULL;
  if (repeated == NULL) {
    if (f->repeats) f->choice = f->expected;
    return NULL;
  }
  repeated->is_repeated = 1;
  f->choice = repeated->choice;
  return repeated;
}

/* Records the forward once all ranks continue; all ranks record the same forwards. */
static void note(const sluice_forward_t* f) {
  if (!f->is_noted) return;
  const sluice_replay_forward_t kept = {.routes = f->routes, .choice = f->choice, .plan = (int16_t)f->plan};
  sluice_replay_add(&f->pass.moe->replay, sluice_forward_keeps(f) ? &kept : NULL);
}

/* ---- execution, once the ranks have agreed ---- */

/* Allocates the kept tensors, once counts are known and before any payload. */
static sluice_status_t allocate_saved(sluice_forward_t* f, void** given) {
  sluice_pass_t* pass = &f->pass;
  uint64_t bytes[SLUICE_SAVED_COUNT], total = 0;
  bytes[SLUICE_SAVED_META] = sluice_binding_meta_bytes(&pass->binding);
  for (int32_t i = SLUICE_SAVED_INPUT; i < SLUICE_SAVED_COUNT; ++i) {
    bytes[i] = pass->slots[sluice_saved_tensors[i]].bytes;
  }
  bytes[SLUICE_SAVED_INPUT] += sluice_binding_kept_bytes(&pass->binding);
  SLUICE_TRY(sluice_step_new(pass->moe, &f->step));
  f->step->is_captured = pass->captured != 0;
  SLUICE_TRY(
      sluice_step_allocate(f->step, bytes, pass->stream, f->args->save, f->args->save_user, f->args->save_is_counted));
  sluice_binding_save(&pass->binding, bytes, f->step->saved[SLUICE_SAVED_META]);
  SLUICE_TRY(sluice_binding_keep(&pass->binding, pass->stream, f->step->saved[SLUICE_SAVED_INPUT]));
  sluice_step_give_saved(f->step, &pass->binding, given);
  for (int32_t i = 0; i < SLUICE_SAVED_COUNT; ++i) total += bytes[i];
  pass->context->stats.saved_bytes = total;
  return SLUICE_OK;
}

static sluice_status_t execute(sluice_forward_t* f) {
  sluice_pass_t* pass = &f->pass;
  void* given[SLUICE_T_COUNT] = {NULL};
  SLUICE_TRY(sluice_pass_measure(pass));
  if (f->args->params != NULL) pass->binding.adapters = sluice_low_signature(f->args->params);
  sluice_binding_stops(&pass->host);
  if (sluice_forward_keeps(f)) SLUICE_TRY(allocate_saved(f, given));
  sluice_binding_starts(&pass->host);
  SLUICE_TRY(sluice_pass_prepare(pass, given));
  pass->params = f->args->params;
  pass->callbacks = f->args->callbacks;
  pass->in_rows = f->args->tokens;
  pass->out_rows = f->args->out_tokens;
  sluice_rows_advise(pass->context->rows, pass->out_rows);
  pass->route_weights = f->args->route_weights;
  sluice_binding_stops(&pass->host);
  return sluice_pass_run(pass);
}

/* Runs the forward that the ranks have agreed on. */
static sluice_status_t run_agreed(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  sluice_binding_t* binding = &f->pass.binding;
  f->pass.agreed_ns = handshake->agreed_ns;
  f->pass.header_ns = handshake->header_ns;
  sluice_binding_starts(&f->pass.host);
  SLUICE_TRY(f->pass.moe->mode->bind(f, handshake));
  binding->max_tokens = handshake->max_tokens; /* binding again resets the binding */
  SLUICE_TRY(sluice_binding_finish(binding));
  if (binding->copies->exchange != NULL) {
    /* The time of a pass includes its tables, so that a race between rows and copies compares all of their work. */
    f->pass.is_marked = sluice_lanes_mark(&f->pass, 0) == SLUICE_OK;
    sluice_binding_stops(&f->pass.host);
    SLUICE_TRY(binding->copies->exchange(binding, f->pass.stream));
    sluice_binding_starts(&f->pass.host);
  }
  return execute(f);
}

/* ---- agreement ---- */

/* Takes a choice for the options that the config leaves open; wgrad mode: of this step's backward. */
static void take_choice(sluice_forward_t* f, const sluice_pass_choice_t* choice) {
  const sluice_moe_config_t* c = &f->pass.moe->shape.config;
  f->choice = *choice;
  if (c->wgrad_mode != SLUICE_WGRAD_ADAPTIVE) f->choice.wgrad_mode = (uint8_t)c->wgrad_mode;
  if (c->grouping != SLUICE_GROUPING_ADAPTIVE) f->choice.grouped = c->grouping == SLUICE_GROUPING_ON;
}

/* The steps that this rank takes before the header; text: why it refuses. */
static sluice_status_t bind_alone(sluice_forward_t* f, sluice_status_t refusal, char* text, uint64_t text_bytes) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(sluice_take_refusal(moe->context, refusal, text, text_bytes));
  look_back(f);
  sluice_status_t status = moe->mode->bind_alone(f);
  if (status != SLUICE_OK) return sluice_take_refusal(moe->context, status, text, text_bytes);
  sluice_lanes_take_pass_times(moe);
  return SLUICE_OK;
}

static sluice_status_t agree(sluice_forward_t* f, sluice_status_t refusal, const char* text,
                             sluice_handshake_t* out_handshake) {
  const sluice_mode_t* mode = f->pass.moe->mode;
  sluice_proposal_t proposal = {
      .direction = SLUICE_FORWARD,
      .repeats = f->repeats,
      .like = f->like,
      .wishes = sluice_forward_keeps(f),
      .num_tokens = refusal == SLUICE_OK ? f->args->expert_ids->shape[0] : 0,
      .held_bytes = atomic_load(&f->pass.context->step_bytes),
      .local_status = refusal,
      .local_message = text,
  };
  mode->propose(f, &proposal);
  sluice_binding_stops(&f->pass.host);
  return mode->agree(&f->pass, &proposal, out_handshake);
}

/* Takes the choice of all ranks, which is the expected one if all have equally many tokens. */
static void take_size(sluice_forward_t* f, const sluice_pass_choice_t* sized) {
  const sluice_pass_choice_t own = f->choice;
  take_choice(f, sized);
  f->is_resized = !sluice_pass_choice_is(&own, &f->choice);
}

static sluice_status_t run(sluice_forward_t* f, sluice_status_t refusal) {
  const sluice_moe_t* moe = f->pass.moe;
  const sluice_mode_t* mode = moe->mode;
  char text[256] = "";
  sluice_handshake_t handshake;
  sluice_binding_starts(&f->pass.host);
  SLUICE_TRY(sluice_mode_tell_failure(moe));
  refusal = bind_alone(f, refusal, text, sizeof text);
  SLUICE_TRY(agree(f, refusal, text, &handshake));
  if (handshake.is_sized) take_size(f, &handshake.sized);
  sluice_status_t status = mode->take_plan(f, &handshake, take_repeated(f, handshake.like));
  if (status == SLUICE_E_OVER_BUDGET) return status; /* on all ranks, before any payload */
  if (status == SLUICE_OK) note(f);
  if (status == SLUICE_OK) status = run_agreed(f, &handshake);
  return status == SLUICE_OK ? SLUICE_OK : mode->fail(&f->pass, status);
}

/* Whether the policy hook chooses by the number of tokens; under a plan, the plan determines the choice. Not if levels
 * are open: counts of rows by node and by rank differ, and headers carry only one of them. */
static int is_sized(const sluice_moe_t* moe, const sluice_moe_forward_args_t* args) {
  return moe->decision.table != NULL && moe->mode == &sluice_mode_exact && !args->repeats &&
         !sluice_shape_levels_are_open(&moe->shape) && moe->context->policy_hook->vtable->of_size != NULL;
}

/* Runs before the header, after which the decision state has the choice of a later forward. If the layer restores rows,
 * its wgrad mode is chosen after the header. */
static void expect(sluice_forward_t* f, sluice_status_t refusal) {
  sluice_moe_t* moe = f->pass.moe;
  sluice_pass_choice_t choice = moe->decision.choice;
  f->is_sized = is_sized(moe, f->args);
  if (f->is_sized && refusal == SLUICE_OK) {
    moe->context->policy_hook->vtable->of_size(moe->context->policy_hook, moe, f->args->expert_ids->shape[0], &choice);
  }
  take_choice(f, &choice);
  f->expected = f->choice;
}

sluice_status_t sluice_run_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args, sluice_stream_t stream,
                                   sluice_status_t refusal, sluice_step_t** out_step) {
  const int is_chosen = moe->decision.table != NULL; /* else all forwards have the same choice */
  sluice_forward_t f = {.args = args,
                        .repeats = is_chosen && args->repeats,
                        .is_noted = is_chosen && !args->repeats,
                        .pass = sluice_run_pass(moe, SLUICE_FORWARD, stream)};
  expect(&f, refusal);
  sluice_status_t status = run(&f, refusal);
  sluice_mode_close(&f.pass, status);
  if (status != SLUICE_OK) {
    sluice_step_drop(f.step);
    return status;
  }
  if (out_step != NULL) *out_step = f.step;
  return SLUICE_OK;
}
