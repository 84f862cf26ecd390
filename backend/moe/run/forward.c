/* A forward, from routing to results. Which way it goes is the layer's strategies' and its mode's affair. */
#include "backend/moe/handshake/failure.h"
#include "backend/moe/pass/lanes.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/routing/offsets.h"
#include "backend/moe/routing/saved_routes.h"
#include "backend/moe/run/mode.h"
#include "backend/moe/run/replay_role.h"
#include "backend/moe/run/run_pass.h"

/* Where kept tensors go, once counts are known and before any payload. */
static sluice_status_t allocate_saved(sluice_forward_t* f, void** given) {
  sluice_pass_t* pass = &f->pass;
  uint64_t bytes[SLUICE_SAVED_COUNT], total = 0;
  bytes[SLUICE_SAVED_META] = sluice_binding_meta_bytes(&pass->binding);
  for (int32_t i = SLUICE_SAVED_INPUT; i < SLUICE_SAVED_COUNT; ++i) {
    bytes[i] = pass->slots[sluice_saved_tensors[i]].bytes;
  }
  bytes[SLUICE_SAVED_INPUT] += sluice_binding_kept_bytes(&pass->binding);
  SLUICE_TRY(sluice_step_new(pass->moe, &f->step));
  f->step->is_captured = pass->captured;
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
  sluice_binding_stops(&pass->host);
  if (sluice_forward_keeps(f)) SLUICE_TRY(allocate_saved(f, given));
  sluice_binding_starts(&pass->host);
  SLUICE_TRY(sluice_pass_prepare(pass, given));
  pass->params = f->args->params;
  pass->callbacks = f->args->callbacks;
  pass->in_rows = f->args->tokens;
  pass->out_rows = f->args->out_tokens;
  pass->context->rows->advise(pass->out_rows);
  pass->route_weights = f->args->route_weights;
  sluice_binding_stops(&pass->host);
  return sluice_pass_run(pass);
}

/* From what the ranks agreed on to results. */
static sluice_status_t run_agreed(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  sluice_binding_t* binding = &f->pass.binding;
  f->pass.agreed_ns = handshake->agreed_ns;
  f->pass.header_ns = handshake->header_ns;
  binding->max_tokens = handshake->max_tokens;
  sluice_binding_starts(&f->pass.host);
  SLUICE_TRY(f->pass.moe->mode->bind(f, handshake));
  SLUICE_TRY(sluice_binding_finish(binding));
  if (binding->copies->exchange != NULL) {
    sluice_binding_stops(&f->pass.host);
    SLUICE_TRY(binding->copies->exchange(binding, f->pass.stream));
    sluice_binding_starts(&f->pass.host);
  }
  return execute(f);
}

/* Everything that this rank can do before the header, or why it refuses. */
static sluice_status_t bind_alone(sluice_forward_t* f, sluice_status_t refusal, char* text, uint64_t text_bytes) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(sluice_take_refusal(moe->context, refusal, text, text_bytes));
  f->role->look_back(f);
  sluice_status_t status = moe->mode->bind_alone(f);
  if (status != SLUICE_OK) return sluice_take_refusal(moe->context, status, text, text_bytes);
  moe->strategies->lanes->take_pass_times(moe);
  return SLUICE_OK;
}

static sluice_status_t agree(sluice_forward_t* f, sluice_status_t refusal, const char* text,
                             sluice_handshake_t* out_handshake) {
  const sluice_mode_t* mode = f->pass.moe->mode;
  sluice_proposal_t proposal = {
      .direction = SLUICE_FORWARD,
      .repeats = f->role->is_repetition,
      .like = f->like,
      .num_tokens = refusal == SLUICE_OK ? f->args->expert_ids->shape[0] : 0,
      .held_bytes = atomic_load(&f->pass.context->step_bytes),
      .local_status = refusal,
      .local_message = text,
  };
  mode->propose(f, &proposal);
  sluice_binding_stops(&f->pass.host);
  return mode->agree(&f->pass, &proposal, out_handshake);
}

static sluice_status_t run(sluice_forward_t* f, sluice_status_t refusal) {
  const sluice_moe_t* moe = f->pass.moe;
  const sluice_mode_t* mode = moe->mode;
  char text[256] = "";
  sluice_handshake_t handshake;
  sluice_binding_starts(&f->pass.host);
  SLUICE_TRY(mode->tell_failure(moe));
  refusal = bind_alone(f, refusal, text, sizeof text);
  SLUICE_TRY(agree(f, refusal, text, &handshake));
  sluice_status_t status = mode->take_plan(f, &handshake, f->role->choose(f, handshake.like));
  if (status == SLUICE_E_OVER_BUDGET) return status; /* on all ranks alike, before any payload */
  if (status == SLUICE_OK) f->role->note(f);
  if (status == SLUICE_OK) status = run_agreed(f, &handshake);
  return status == SLUICE_OK ? SLUICE_OK : mode->fail(&f->pass, status);
}

/* Without a plan: of this step's backward. After the header the decision state has the choice for the next forward,
 * which may be another. Where the layer restores rows it is chosen behind the header. */
static int32_t wgrad_mode_of(const sluice_moe_t* moe) {
  const int32_t given = moe->shape.config.wgrad_mode;
  return given == SLUICE_WGRAD_ADAPTIVE ? moe->decision.wgrad_mode : given;
}

static int32_t grouped_of(const sluice_moe_t* moe) {
  const int32_t given = moe->shape.config.grouping;
  return given == SLUICE_GROUPING_ADAPTIVE ? moe->decision.grouped : given == SLUICE_GROUPING_ON;
}

sluice_status_t sluice_run_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args, sluice_stream_t stream,
                                   sluice_status_t refusal, sluice_step_t** out_step) {
  sluice_forward_t f = {.args = args,
                        .role = sluice_replay_role_of(moe, args),
                        .num_chunks = moe->decision.num_chunks,
                        .wgrad_mode = wgrad_mode_of(moe),
                        .grouped = grouped_of(moe),
                        .two_levels = moe->decision.two_levels,
                        .restore_set = moe->decision.restore_set,
                        .pass = sluice_run_pass(moe, SLUICE_FORWARD, stream)};
  sluice_status_t status = run(&f, refusal);
  moe->mode->close(&f.pass, status);
  if (status != SLUICE_OK) {
    sluice_step_drop(f.step);
    return status;
  }
  if (out_step != NULL) *out_step = f.step;
  return SLUICE_OK;
}
