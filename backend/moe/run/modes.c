// SPDX-License-Identifier: Apache-2.0
/* The four modes of mode.h, and which one a layer has. */
#include "backend/model/pass_sizes.h"
#include "backend/moe/handshake/handshake.h"
#include "backend/moe/ops/run_op.h"
#include "backend/moe/routing/routes.h"
#include "backend/moe/run/capacity.h"
#include "backend/moe/run/mode.h"
#include "backend/moe/run/planned_forward.h"

/* ---- opening a call ---- */

static sluice_status_t open(sluice_pass_t* pass) {
  return pass->context->rows->open(pass->context, pass->stream, &pass->captured);
}

/* For a call that waits for counts. */
static sluice_status_t open_outside_capture(sluice_pass_t* pass) {
  SLUICE_TRY(open(pass));
  if (!pass->captured) return SLUICE_OK;
  pass->captured = 0;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "layer %d: the stream is being captured into a graph, which cannot wait for counts: set "
                     "exchange_mode to SLUICE_EXCHANGE_CAPACITY",
                     pass->moe->shape.config.layer_id);
}

/* ---- modes with a header in every call ---- */

/* The next call's header reports it, unless the other ranks' exchanges of this pass wait for this rank. */
static sluice_status_t fail_by_header(const sluice_pass_t* pass, sluice_status_t status) {
  return sluice_fail_pass(pass->context, status, pass->is_complete);
}

/* ---- modes without a plan ---- */

/* The most rows that a rank receives if routing is balanced; under a capacity the number of places. */
static int64_t balanced_rows(const sluice_forward_t* f, const sluice_handshake_t* handshake) {
  const sluice_shape_t* shape = &f->pass.moe->shape;
  const int64_t capacity = sluice_shape_capacity(shape);
  if (capacity > 0) return capacity * shape->world_size * shape->most_local * f->choice.num_chunks;
  return handshake->max_tokens * shape->config.top_k;
}

/* Chooses the wgrad mode if rows are restored and the config names none, by values that all ranks know by now, so that
 * they choose the same. */
static sluice_status_t take_no_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                    const sluice_replay_forward_t* repeated) {
  (void)repeated;
  const sluice_moe_t* moe = f->pass.moe;
  if (!sluice_shape_is_lean(&moe->shape)) return SLUICE_OK;
  const int reuse = moe->shape.config.reuse;
  f->choice.wgrad_mode = (uint8_t)sluice_leanest_wgrad_mode(
      &moe->shape, reuse || sluice_shape_restores_input(&moe->shape),
      reuse || sluice_shape_restores_pre_activation(&moe->shape), f->choice.num_chunks, balanced_rows(f, handshake));
  return SLUICE_OK;
}

/* Proposes n and, for a forward that `is_known`, the hash that the ranks compare. */
static void propose_by_config(const sluice_forward_t* f, int is_known, sluice_proposal_t* proposal) {
  proposal->num_chunks = f->choice.num_chunks;
  proposal->deduplicate = f->choice.deduplicate;
  proposal->comm_hash = is_known ? sluice_pass_comm_hash(&f->pass) : (uint64_t)sluice_forward_keeps(f);
}

/* ---- exact: all routed rows, in chunks of equal sizes, bound before the header, which carries their counts ---- */

static sluice_status_t exact_agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                                   sluice_handshake_t* out_handshake) {
  const int has_counts = proposal->direction == SLUICE_FORWARD && proposal->local_status == SLUICE_OK;
  return sluice_handshake(pass->moe, proposal, has_counts ? &pass->binding : NULL, out_handshake);
}

static sluice_status_t exact_bind_alone(sluice_forward_t* f) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(open_outside_capture(&f->pass));
  f->pass.binding.deduplicate = f->choice.deduplicate;
  SLUICE_TRY(
      moe->strategies->routes->order(moe, f->pass.stream, f->args->expert_ids, f->choice.num_chunks, &f->pass.binding));
  return sluice_forward_choose_by_config(f, f->choice.num_chunks);
}

/* The n of a repeated or sized forward is not known yet, nor is its schedule. */
static void exact_propose(const sluice_forward_t* f, sluice_proposal_t* proposal) {
  const int is_known = proposal->local_status == SLUICE_OK && !f->repeats && !f->is_sized;
  proposal->is_sized = f->is_sized;
  propose_by_config(f, is_known, proposal);
}

/* Binds again if some rank bound other chunks than the repeated forward had, or than the largest T needs. */
static sluice_status_t exact_bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  if (handshake->is_uncounted) {
    f->choice.num_chunks = (int16_t)handshake->num_chunks;
    SLUICE_TRY(exact_bind_alone(f));
    SLUICE_TRY(sluice_exchange_counts(&f->pass.binding));
  } else if (f->repeats || f->is_resized) { /* the repeated forward may have had another strategy */
    SLUICE_TRY(sluice_forward_choose_by_config(f, f->choice.num_chunks));
  }
  f->pass.binding.wgrad_mode = f->choice.wgrad_mode;
  return SLUICE_OK;
}

const sluice_mode_t sluice_mode_exact = {.open = open_outside_capture,
                                         .agree = exact_agree,
                                         .fail = fail_by_header,
                                         .bind_alone = exact_bind_alone,
                                         .propose = exact_propose,
                                         .take_plan = take_no_plan,
                                         .bind = exact_bind};

/* ---- under a plan ---- */

/* Ids are read before the header, which carries the largest T and the bytes that ranks hold. Afterwards chunks are cut
 * by received rows, and counts are exchanged. */

static sluice_status_t planned_agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                                     sluice_handshake_t* out_handshake) {
  return sluice_handshake(pass->moe, proposal, NULL, out_handshake);
}

static sluice_status_t planned_bind_alone(sluice_forward_t* f) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(open_outside_capture(&f->pass));
  return moe->strategies->routes->look(moe, f->pass.memory, f->pass.stream, f->args->expert_ids, &f->counts);
}

static sluice_status_t planned_take_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                         const sluice_replay_forward_t* repeated) {
  SLUICE_TRY(sluice_planned_take(f, handshake, repeated));
  if (!sluice_forward_keeps(f)) return SLUICE_OK;
  return sluice_planned_check_room(f->pass.moe, handshake->held_bytes, handshake->held_pool_bytes);
}

static sluice_status_t planned_bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  (void)handshake;
  SLUICE_TRY(sluice_planned_bind(f->pass.moe, f->pass.stream, f->args->expert_ids, f->counts, sluice_forward_keeps(f),
                                 &f->pass.binding));
  sluice_run_take_travel(&f->pass);
  return sluice_forward_take_template(f);
}

const sluice_mode_t sluice_mode_under_plan = {.is_bounded = 1,
                                              .open = open_outside_capture,
                                              .agree = planned_agree,
                                              .fail = fail_by_header,
                                              .bind_alone = planned_bind_alone,
                                              .propose = sluice_planned_propose,
                                              .take_plan = planned_take_plan,
                                              .bind = planned_bind};

/* ---- capacity: every expert position has the same number of rows in each chunk ---- */

/* The schedule is chosen first, because it determines whether a call needs a header and may be captured. */

static sluice_status_t capacity_bind_alone(sluice_forward_t* f) {
  SLUICE_TRY(open(&f->pass));
  SLUICE_TRY(sluice_forward_choose_by_config(f, f->choice.num_chunks));
  SLUICE_TRY(sluice_capacity_check_capture(&f->pass));
  SLUICE_TRY(sluice_capacity_bind(&f->pass, f->args->expert_ids, f->choice.num_chunks));
  return sluice_forward_choose_by_config(f, f->choice.num_chunks); /* routing has reset the binding */
}

static void capacity_propose(const sluice_forward_t* f, sluice_proposal_t* proposal) {
  propose_by_config(f, proposal->local_status == SLUICE_OK, proposal);
}

static sluice_status_t capacity_bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  (void)handshake;
  f->pass.binding.wgrad_mode = f->choice.wgrad_mode;
  return SLUICE_OK;
}

const sluice_mode_t sluice_mode_capacity = {.tell_failure = sluice_capacity_tell_failure,
                                            .open = open,
                                            .check_capture = sluice_capacity_check_capture,
                                            .agree = sluice_capacity_agree,
                                            .fail = sluice_capacity_fail,
                                            .close = sluice_capacity_close,
                                            .bind_alone = capacity_bind_alone,
                                            .propose = capacity_propose,
                                            .take_plan = take_no_plan,
                                            .bind = capacity_bind,
                                            .note_alone = sluice_capacity_note_agreed};

/* ---- capacity under a plan, which chooses only policies ---- */

/* Calls need no header while the plan stays the same. All ranks have the same plan, so the refusals before the header
 * are the same on all ranks. */

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

static sluice_status_t capacity_planned_bind_alone(sluice_forward_t* f) {
  sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(open(&f->pass));
  SLUICE_TRY(sluice_routes_check(moe->strategies->routes, moe, f->args->expert_ids));
  if (moe->plan != NULL) SLUICE_TRY(choose_template(f, f->choice.num_chunks));
  SLUICE_TRY(sluice_capacity_check_capture(&f->pass));
  if (moe->plan == NULL) return SLUICE_OK; /* made after the header */
  if (sluice_capacity_is_agreed(moe, f->pass.schedule)) return check_tokens(f);
  f->pass.schedule = NULL; /* the header determines whether the plan is large enough */
  return SLUICE_OK;
}

/* Without a header, room is judged by the plans' promises: equal on all ranks, and at least the bytes held. */
static sluice_status_t capacity_planned_take_plan(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                                  const sluice_replay_forward_t* repeated) {
  SLUICE_TRY(sluice_planned_take(f, handshake, repeated));
  if (!sluice_forward_keeps(f)) return SLUICE_OK;
  const sluice_ledger_sums_t sums = sluice_ledger_sums(&f->pass.context->ledger);
  return sluice_planned_check_room(f->pass.moe, sums.promised, sums.promised_pool);
}

static sluice_status_t capacity_planned_bind(sluice_forward_t* f, const sluice_handshake_t* handshake) {
  (void)handshake;
  SLUICE_TRY(sluice_capacity_bind(&f->pass, f->args->expert_ids, f->choice.num_chunks));
  SLUICE_TRY(choose_template(f, f->choice.num_chunks));
  sluice_capacity_note_agreed(&f->pass);
  return SLUICE_OK;
}

const sluice_mode_t sluice_mode_capacity_under_plan = {.is_bounded = 1,
                                                       .tell_failure = sluice_capacity_tell_failure,
                                                       .open = open,
                                                       .check_capture = sluice_capacity_check_capture,
                                                       .agree = sluice_capacity_agree,
                                                       .fail = sluice_capacity_fail,
                                                       .close = sluice_capacity_close,
                                                       .bind_alone = capacity_planned_bind_alone,
                                                       .propose = sluice_planned_propose,
                                                       .take_plan = capacity_planned_take_plan,
                                                       .bind = capacity_planned_bind,
                                                       .note_alone = sluice_capacity_note_agreed};

/* ---- the mode of a layer ---- */

void sluice_layer_choose_mode(sluice_moe_t* moe) {
  static const sluice_mode_t* const modes[2][2] = {{&sluice_mode_exact, &sluice_mode_under_plan},
                                                   {&sluice_mode_capacity, &sluice_mode_capacity_under_plan}};
  moe->mode = modes[moe->capacity != NULL][sluice_is_planned(moe)];
}

sluice_pass_t sluice_run_pass(sluice_moe_t* moe, int32_t direction, sluice_stream_t stream) {
  return (sluice_pass_t){.context = moe->context,
                         .moe = moe,
                         .memory = &moe->context->pass_memory,
                         .binding = {.memory = &moe->context->pass_memory,
                                     .deduplicate = (uint8_t)sluice_shape_deduplication(&moe->shape)},
                         .stream = stream,
                         .is_bounded = moe->mode->is_bounded,
                         .run_op = direction == SLUICE_FORWARD ? sluice_run_forward_op : sluice_run_backward_op,
                         .travel = moe->strategies->travel,
                         .begin_ns = sluice_now_ns(),
                         .host = {.is_on = sluice_pass_is_watched(moe)}};
}
