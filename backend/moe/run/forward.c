#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/tensor.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/handshake/agree.h"
#include "backend/moe/handshake/failure.h"
#include "backend/moe/ops/run_op.h"
#include "backend/moe/ops/travel.h"
#include "backend/moe/pass/lanes.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/routing/offsets.h"
#include "backend/moe/routing/saved_routes.h"
#include "backend/moe/run/ceiling.h"
#include "backend/moe/run/planned.h"
#include "backend/moe/run/run.h"

typedef struct forward_s {
  sluice_pass_t pass;
  const sluice_moe_forward_args_t* args;
  sluice_step_t* step;
  int32_t* far_counts; /* on a far device under a plan: routes by block of tokens and place */
  /* Where somebody chooses n or the plan. What activation checkpointing runs again must leave what the first time left,
   * or the host cannot put one in the other's place: the same n and the same plan. */
  int32_t is_open, repeats;
  uint64_t routes;
  int32_t wgrad_mode; /* without a plan: of this step's backward */
} forward_t;

static sluice_template_spec_t spec_of(const sluice_moe_t* moe, const sluice_binding_t* binding, int keep) {
  sluice_template_spec_t spec = {
      .direction = SLUICE_FORWARD,
      .num_chunks = binding->num_chunks,
      .single_rank = moe->context->world_size == 1,
      .keep = keep,
      .callback = moe->shape.config.callback_experts,
      .gated = moe->shape.config.gated != SLUICE_GATED_NO,
      .bounded = sluice_is_planned(moe),
      .dedup = sluice_shape_is_deduplicated(&moe->shape),
      .cut_rows = binding->cut_rows,
  };
  memcpy(spec.restore_di, binding->restore_di, sizeof spec.restore_di);
  memcpy(spec.restore_m, binding->restore_m, sizeof spec.restore_m);
  return spec;
}

static int is_kept(const forward_t* f) { return f->args->needs_backward != 0; }

static sluice_status_t take_template(forward_t* f, sluice_moe_t* moe) {
  const sluice_template_spec_t spec = spec_of(moe, &f->pass.binding, is_kept(f));
  return sluice_engine_template(moe->context, &spec, &f->pass.schedule);
}

/* The plan's policies, or the config's. */
static sluice_status_t choose_template(forward_t* f, sluice_moe_t* moe, int32_t num_chunks) {
  const sluice_plan_data_t* plan = moe->plan;
  int32_t di = plan != NULL ? plan->restore_di : sluice_restore_of(moe->shape.config.restore_input);
  int32_t m = plan != NULL ? plan->restore_m : sluice_restore_of(moe->shape.config.restore_middle);
  sluice_binding_t* binding = &f->pass.binding;
  const sluice_chunk_policies_t* by_chunk = plan != NULL ? &plan->inputs.policies : &moe->shape.policies;
  binding->num_chunks = num_chunks;
  for (int32_t i = 0; i < num_chunks && is_kept(f); ++i) {
    binding->restore_di[i] = (uint8_t)sluice_policy_of_di(di, by_chunk, i);
    binding->restore_m[i] = (uint8_t)sluice_policy_of_m(m, by_chunk, i);
  }
  if (plan != NULL) sluice_planned_note(moe, binding);
  return take_template(f, moe);
}

/* The schedule comes first: whether the call needs a header, and may be captured, depends on it alone. */
static sluice_status_t bind_under_ceiling(forward_t* f, sluice_moe_t* moe, int32_t num_chunks) {
  SLUICE_TRY(choose_template(f, moe, num_chunks));
  SLUICE_TRY(sluice_ceiling_check_capture(&f->pass));
  return sluice_ceiling_bind(&f->pass, f->args->expert_ids, num_chunks);
}

/* Under a plan that has not changed such calls need no header; what this rank alone may refuse comes first. All ranks
 * find the same, since they have the same plan. */
static sluice_status_t open_planned_ceiling(forward_t* f, sluice_moe_t* moe, int32_t num_chunks) {
  if (moe->plan != NULL) SLUICE_TRY(choose_template(f, moe, num_chunks));
  SLUICE_TRY(sluice_ceiling_check_capture(&f->pass));
  if (moe->plan == NULL) return SLUICE_OK;
  if (!sluice_ceiling_is_agreed(moe, f->pass.schedule)) {
    f->pass.schedule = NULL; /* the header tells whether the plan is for as many tokens as there are */
    return SLUICE_OK;
  }
  int64_t tokens = f->args->expert_ids->shape[0], most = moe->plan->inputs.max_tokens;
  if (tokens <= most) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                     "layer %d: %lld tokens, and the plan that the ranks agreed on under ceilings is for at most %lld: "
                     "pass so many, or begin with the largest batch, or make a plan for more (sluice_plan_create)",
                     moe->shape.config.layer_id, (long long)tokens, (long long)most);
}

/* Under a plan: ids are looked at, on a far device with the one read of the forward, and counted by the way. Under
 * ceilings nothing is read there: what every chunk has is known, and the tally tells of ids that name nothing. */
static sluice_status_t check_planned(forward_t* f, sluice_moe_t* moe) {
  SLUICE_TRY(sluice_ceiling_open(&f->pass));
  const sluice_routes_t* routes = moe->strategies->routes;
  if (moe->ceiling != NULL) return routes->check(moe, f->args->expert_ids);
  return routes->look(moe, f->pass.memory, f->pass.stream, f->args->expert_ids, &f->far_counts);
}

/* Everything this rank can do alone before the header. Without a plan that is template and routing: chunks have equal
 * numbers of tokens, or of rows for each rank, whatever is received. Under a plan the cut needs the other ranks'
 * counts. */
static sluice_status_t bind_local(forward_t* f, sluice_moe_t* moe, int32_t num_chunks) {
  if (sluice_is_planned(moe)) {
    SLUICE_TRY(check_planned(f, moe));
    return moe->ceiling != NULL ? open_planned_ceiling(f, moe, num_chunks) : SLUICE_OK;
  }
  sluice_binding_t* binding = &f->pass.binding;
  SLUICE_TRY(sluice_ceiling_open(&f->pass));
  if (moe->ceiling != NULL) {
    SLUICE_TRY(bind_under_ceiling(f, moe, num_chunks));
  } else {
    const sluice_routes_t* routes = moe->strategies->routes;
    SLUICE_TRY(routes->order(moe, f->pass.stream, f->args->expert_ids, num_chunks, binding));
  }
  return choose_template(f, moe, num_chunks);
}

static sluice_status_t bind_planned(forward_t* f, sluice_moe_t* moe) {
  if (moe->ceiling != NULL) {
    int32_t num_chunks = moe->plan->num_chunks;
    SLUICE_TRY(sluice_ceiling_bind(&f->pass, f->args->expert_ids, num_chunks));
    SLUICE_TRY(choose_template(f, moe, num_chunks));
    sluice_ceiling_note_agreed(moe, f->pass.schedule);
    return SLUICE_OK;
  }
  SLUICE_TRY(
      sluice_planned_bind(moe, f->pass.stream, f->args->expert_ids, f->far_counts, is_kept(f), &f->pass.binding));
  return take_template(f, moe);
}

/* Where kept tensors go, once counts are known and before any payload. */
static sluice_status_t allocate_saved(forward_t* f, sluice_moe_t* moe, void** given) {
  if (!f->args->needs_backward) return SLUICE_OK;
  uint64_t bytes[SLUICE_SAVED_COUNT], total = 0;
  bytes[SLUICE_SAVED_META] = sluice_binding_meta_bytes(&f->pass.binding);
  for (int32_t i = SLUICE_SAVED_INPUT; i < SLUICE_SAVED_COUNT; ++i) {
    bytes[i] = f->pass.slots[sluice_saved_tensors[i]].bytes;
  }
  bytes[SLUICE_SAVED_INPUT] += sluice_binding_kept_bytes(&f->pass.binding);
  SLUICE_TRY(sluice_step_new(moe, &f->step));
  f->step->is_captured = f->pass.captured;
  SLUICE_TRY(sluice_step_allocate(f->step, bytes, f->pass.stream, f->args->save, f->args->save_user,
                                  f->args->save_is_counted));
  sluice_binding_save(&f->pass.binding, bytes, f->step->saved[SLUICE_SAVED_META]);
  SLUICE_TRY(sluice_binding_keep(&f->pass.binding, f->pass.stream, f->step->saved[SLUICE_SAVED_INPUT]));
  sluice_step_give_saved(f->step, &f->pass.binding, given);
  for (int32_t i = 0; i < SLUICE_SAVED_COUNT; ++i) total += bytes[i];
  moe->context->stats.saved_bytes = total;
  return SLUICE_OK;
}

static sluice_status_t execute(forward_t* f, sluice_moe_t* moe) {
  void* given[SLUICE_T_COUNT] = {NULL};
  SLUICE_TRY(sluice_pass_measure(&f->pass));
  sluice_binding_stops(&f->pass.host);
  SLUICE_TRY(allocate_saved(f, moe, given));
  sluice_binding_starts(&f->pass.host);
  SLUICE_TRY(sluice_pass_prepare(&f->pass, given));
  f->pass.params = f->args->params;
  f->pass.callbacks = f->args->callbacks;
  f->pass.in_rows = f->args->tokens;
  f->pass.out_rows = f->args->out_tokens;
  moe->context->rows->advise(f->pass.out_rows);
  f->pass.route_weights = f->args->route_weights;
  sluice_binding_stops(&f->pass.host);
  return sluice_pass_run(&f->pass);
}

/* The ranks agree, or have agreed on such calls before. */
static sluice_status_t agree(forward_t* f, sluice_moe_t* moe, const sluice_proposal_t* proposal,
                             sluice_agreement_t* out_agreement) {
  int refuses = proposal->local_status != SLUICE_OK;
  int is_known = refuses || f->pass.schedule != NULL; /* else a plan is still to come */
  if (is_known && sluice_ceiling_is_agreed(moe, refuses ? NULL : f->pass.schedule)) {
    *out_agreement = sluice_agreement_alone(proposal);
    return sluice_ceiling_skip_header(moe, proposal->local_status);
  }
  int has_counts = !refuses && !sluice_is_planned(moe) && moe->ceiling == NULL;
  SLUICE_TRY(sluice_agree(moe, proposal, has_counts ? &f->pass.binding : NULL, out_agreement));
  if (f->pass.schedule != NULL) sluice_ceiling_note_agreed(moe, f->pass.schedule);
  return SLUICE_OK;
}

static sluice_status_t run_agreed(forward_t* f, sluice_moe_t* moe, const sluice_agreement_t* agreement) {
  f->pass.agreed_ns = agreement->agreed_ns;
  f->pass.header_ns = agreement->header_ns;
  sluice_binding_starts(&f->pass.host);
  if (sluice_is_planned(moe)) SLUICE_TRY(bind_planned(f, moe));
  if (agreement->is_uncounted) {
    SLUICE_TRY(bind_local(f, moe, agreement->num_chunks));
    SLUICE_TRY(sluice_exchange_counts(&f->pass.binding));
  }
  if (!sluice_is_planned(moe)) f->pass.binding.wgrad_mode = (uint8_t)f->wgrad_mode;
  SLUICE_TRY(sluice_binding_finish(&f->pass.binding));
  sluice_binding_stops(&f->pass.host);
  SLUICE_TRY(f->pass.binding.copies->exchange(&f->pass.binding, f->pass.stream));
  sluice_binding_starts(&f->pass.host);
  return execute(f, moe);
}

static sluice_status_t take_plan(forward_t* f, sluice_moe_t* moe, const sluice_agreement_t* agreement) {
  sluice_kept_forward_t* repeated = f->repeats ? sluice_kept_choose(&moe->kept, agreement->like) : NULL;
  if (repeated != NULL) repeated->is_repeated = 1, f->wgrad_mode = repeated->wgrad_mode;
  return sluice_is_planned(moe) ? sluice_planned_prepare(moe, agreement, repeated) : SLUICE_OK;
}

/* For its repetition. All ranks do this for the same forwards. */
static void note_kept(const forward_t* f, sluice_moe_t* moe) {
  if (!f->is_open || f->args->repeats) return;
  const int32_t plan = moe->plan != NULL ? (int32_t)(moe->plan - moe->plans->plans) : 0;
  const sluice_kept_forward_t kept = {
      .routes = f->routes,
      .num_chunks = moe->plan != NULL ? moe->plan->num_chunks : f->pass.binding.num_chunks,
      .plan = (int16_t)plan,
      .wgrad_mode = (int16_t)f->wgrad_mode,
  };
  sluice_kept_add(&moe->kept, is_kept(f) ? &kept : NULL);
}

/* A plan, and room under it. OVER_BUDGET on all ranks alike. */
static sluice_status_t prepare(forward_t* f, sluice_moe_t* moe, const sluice_agreement_t* agreement) {
  SLUICE_TRY(take_plan(f, moe, agreement));
  if (!sluice_is_planned(moe)) return SLUICE_OK;
  if (!is_kept(f)) return SLUICE_OK;
  if (moe->ceiling == NULL) return sluice_planned_check_room(moe, agreement->held_bytes, agreement->held_pool_bytes);
  /* Without a header, by what plans promised: alike on all ranks, and no less than what is held. */
  const sluice_ledger_sums_t sums = sluice_ledger_sums(&moe->context->ledger);
  return sluice_planned_check_room(moe, sums.promised, sums.promised_pool);
}

/* Without a plan. After the header the seat has the choice for the next forward, which may be another. */
static int32_t mode_of(const sluice_moe_t* moe) {
  const int32_t given = moe->shape.config.wgrad_mode;
  return given == SLUICE_WGRAD_ADAPTIVE ? moe->seat.wgrad_mode : given;
}

/* The forward that this one may repeat, by this rank's routing, else what this one takes. */
static uint32_t look_back(forward_t* f, sluice_moe_t* moe, int32_t* out_num_chunks) {
  *out_num_chunks = moe->seat.num_chunks;
  f->wgrad_mode = mode_of(moe);
  if (f->is_open && (is_kept(f) || f->repeats)) f->routes = moe->strategies->routes->hash(moe, f->args->expert_ids);
  if (!f->repeats) return 0;
  const uint32_t like = sluice_kept_like(&moe->kept, f->routes);
  const sluice_kept_forward_t* repeated = sluice_kept_choose(&moe->kept, like);
  if (repeated != NULL) *out_num_chunks = repeated->num_chunks;
  return like;
}

static sluice_status_t run(forward_t* f, sluice_moe_t* moe, sluice_status_t refusal) {
  sluice_context_t* context = moe->context;
  int32_t num_chunks = moe->seat.num_chunks;
  uint32_t like = 0;
  char text[256] = "";
  sluice_binding_starts(&f->pass.host);
  if (sluice_ceiling_is_agreed(moe, NULL)) SLUICE_TRY(sluice_ceiling_tell_failure(context));
  refusal = sluice_take_refusal(context, refusal, text, sizeof text);
  if (refusal == SLUICE_OK) {
    like = look_back(f, moe, &num_chunks);
    refusal = bind_local(f, moe, num_chunks);
    if (refusal != SLUICE_OK) refusal = sluice_take_refusal(context, refusal, text, sizeof text);
  }
  if (refusal == SLUICE_OK) moe->strategies->lanes->take_pass_times(moe);
  int planned = sluice_is_planned(moe);
  const sluice_proposal_t proposal = {
      .direction = SLUICE_FORWARD,
      .repeats = f->repeats,
      .like = like,
      .num_chunks = planned ? 0 : num_chunks,
      /* A repetition's n is still to be found. */
      .comm_hash =
          refusal == SLUICE_OK && !planned && !f->repeats ? sluice_pass_comm_hash(&f->pass) : (uint64_t)is_kept(f),
      .num_tokens = refusal == SLUICE_OK ? f->args->expert_ids->shape[0] : 0,
      .base_bytes = planned ? sluice_planned_base_bytes(moe) : 0,
      .held_bytes = atomic_load(&context->step_bytes),
      .held_pool_bytes = planned ? sluice_ledger_sums(&context->ledger).pool : 0,
      .local_status = refusal,
      .local_message = text,
  };
  sluice_agreement_t agreement;
  sluice_binding_stops(&f->pass.host);
  SLUICE_TRY(agree(f, moe, &proposal, &agreement));
  sluice_status_t status = prepare(f, moe, &agreement);
  if (status == SLUICE_E_OVER_BUDGET) return status; /* on all ranks alike, before any payload */
  if (status == SLUICE_OK) note_kept(f, moe);
  if (status == SLUICE_OK) status = run_agreed(f, moe, &agreement);
  if (status == SLUICE_OK) return SLUICE_OK;
  return moe->ceiling != NULL ? sluice_ceiling_fail(&f->pass, status)
                              : sluice_fail_pass(context, status, f->pass.is_complete);
}

sluice_status_t sluice_run_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args, sluice_stream_t stream,
                                   sluice_status_t refusal, sluice_step_t** out_step) {
  const int32_t is_open = moe->seat.table != NULL;
  forward_t f = {.args = args,
                 .is_open = is_open,
                 .repeats = is_open && args->repeats,
                 .pass = {.context = moe->context,
                          .moe = moe,
                          .memory = &moe->context->pass_memory,
                          .binding = {.memory = &moe->context->pass_memory},
                          .stream = stream,
                          .run_op = sluice_run_forward_op,
                          .travel = moe->strategies->travel,
                          .begin_ns = sluice_now_ns(),
                          .host = {.is_on = sluice_pass_is_watched(moe)}}};
  sluice_status_t status = run(&f, moe, refusal);
  sluice_ceiling_close(&f.pass, status);
  if (status != SLUICE_OK) {
    sluice_step_drop(f.step);
    return status;
  }
  if (out_step != NULL) *out_step = f.step;
  return SLUICE_OK;
}
