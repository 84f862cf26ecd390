#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/tensor.h"
#include "backend/moe/agree.h"
#include "backend/moe/pass.h"
#include "backend/moe/run.h"

typedef struct forward_s {
  sluice_pass_t pass;
  const sluice_moe_forward_args_t* args;
  sluice_step_t* step;
} forward_t;

static sluice_template_spec_t spec_of(const sluice_moe_t* moe, int32_t num_chunks, int keep) {
  sluice_template_spec_t spec = {
      .direction = SLUICE_FORWARD,
      .num_chunks = num_chunks,
      .single_rank = moe->context->world_size == 1,
      .keep = keep,
      .callback = moe->config.callback_experts,
      .gated = moe->config.gated,
  };
  for (int32_t i = 0; i < num_chunks && keep; ++i) {
    spec.restore_di[i] = (uint8_t)moe->config.restore_input;
    spec.restore_m[i] = (uint8_t)moe->config.restore_middle;
  }
  return spec;
}

/* Everything this rank can do alone before the header: template and routing. */
static sluice_status_t bind_local(forward_t* f, sluice_moe_t* moe, int32_t num_chunks) {
  const sluice_template_spec_t spec = spec_of(moe, num_chunks, f->args->needs_backward != 0);
  SLUICE_TRY(sluice_engine_template(moe->context, &spec, &f->pass.schedule));
  SLUICE_TRY(sluice_binding_route(moe, f->args->expert_ids, num_chunks, &f->pass.binding));
  memcpy(f->pass.binding.restore_di, spec.restore_di, sizeof spec.restore_di);
  memcpy(f->pass.binding.restore_m, spec.restore_m, sizeof spec.restore_m);
  return SLUICE_OK;
}

/* Where kept tensors go, once counts are known and before any payload. */
static sluice_status_t allocate_saved(forward_t* f, sluice_moe_t* moe, void** given) {
  if (!f->args->needs_backward) return SLUICE_OK;
  uint64_t bytes[SLUICE_SAVED_COUNT], total = 0;
  bytes[SLUICE_SAVED_META] = sluice_binding_meta_bytes(&f->pass.binding);
  for (int32_t i = SLUICE_SAVED_INPUT; i < SLUICE_SAVED_COUNT; ++i) {
    bytes[i] = f->pass.slots[sluice_saved_tensors[i]].bytes;
  }
  SLUICE_TRY(sluice_step_new(moe, &f->step));
  SLUICE_TRY(sluice_step_allocate(f->step, bytes, f->args->save, f->args->save_user));
  sluice_binding_save(&f->pass.binding, bytes, f->step->saved[SLUICE_SAVED_META]);
  for (int32_t i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    if (i != SLUICE_SAVED_META) given[sluice_saved_tensors[i]] = f->step->saved[i];
    total += bytes[i];
  }
  moe->context->stats.saved_bytes = total;
  return SLUICE_OK;
}

static sluice_status_t execute(forward_t* f, sluice_moe_t* moe) {
  void* given[SLUICE_T_COUNT] = {NULL};
  SLUICE_TRY(sluice_pass_measure(&f->pass));
  SLUICE_TRY(allocate_saved(f, moe, given));
  SLUICE_TRY(sluice_pass_prepare(&f->pass, given));
  f->pass.params = f->args->params;
  f->pass.callbacks = f->args->callbacks;
  f->pass.in_rows = f->args->tokens;
  f->pass.out_rows = f->args->out_tokens;
  f->pass.route_weights = f->args->route_weights;
  return sluice_pass_run(&f->pass);
}

sluice_status_t sluice_run_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args, sluice_status_t refusal,
                                   sluice_step_t** out_step) {
  sluice_context_t* context = moe->context;
  forward_t f = {.args = args, .pass = {.context = context, .moe = moe, .begin_ns = sluice_now_ns()}};
  int32_t num_chunks = moe->granularity.current;
  char text[256] = "";
  refusal = sluice_take_refusal(context, refusal, text, sizeof text);
  if (refusal == SLUICE_OK) {
    refusal = bind_local(&f, moe, num_chunks);
    if (refusal != SLUICE_OK) refusal = sluice_take_refusal(context, refusal, text, sizeof text);
  }
  const sluice_proposal_t proposal = {
      .direction = SLUICE_FORWARD,
      .num_chunks = num_chunks,
      .comm_hash = refusal == SLUICE_OK ? f.pass.schedule->comm_hash : 0,
      .num_tokens = refusal == SLUICE_OK ? f.pass.binding.num_tokens : 0,
      .local_status = refusal,
      .local_message = text,
  };
  SLUICE_TRY(sluice_agree(moe, &proposal, refusal == SLUICE_OK ? &f.pass.binding : NULL, &f.pass.agreed_ns));
  sluice_status_t status = sluice_binding_finish(&f.pass.binding);
  if (status == SLUICE_OK) status = execute(&f, moe);
  if (status != SLUICE_OK) {
    status = sluice_fail_pass(context, status, f.pass.is_complete);
    sluice_step_drop(f.step);
    return status;
  }
  if (out_step != NULL) *out_step = f.step;
  return SLUICE_OK;
}
