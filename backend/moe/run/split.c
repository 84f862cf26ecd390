// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/split.h"

#include "backend/moe/handshake/handshake.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/pass/pass.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/routes.h"
#include "backend/moe/routing/saved_routes.h"
#include "backend/moe/run/mode.h"

static sluice_template_spec_t spec_of(const sluice_moe_t* moe, int32_t direction, int32_t part) {
  return (sluice_template_spec_t){
      .direction = direction,
      .num_chunks = 1,
      .single_rank = moe->context->world_size == 1 || part == SLUICE_PART_EXPERTS,
      .keep = direction == SLUICE_FORWARD && part == SLUICE_PART_EXPERTS, /* the host keeps rows and pre */
      .gated = moe->shape.config.gated != SLUICE_GATED_NO,
      .dgrad = direction == SLUICE_BACKWARD,
      .only = part,
      .low_rank = part == SLUICE_PART_EXPERTS && moe->shape.config.lora_rank > 0,
  };
}

static sluice_pass_t pass_of(sluice_moe_t* moe, int32_t direction) {
  sluice_pass_t pass = sluice_run_pass(moe, direction, NULL);
  pass.host.is_on = 0; /* counters of binding and walking are for whole passes */
  return pass;
}

/* Exchanges the header of a part. `status` and its record: why this rank refuses, if it does. */
static sluice_status_t agree(sluice_pass_t* pass, int32_t direction, sluice_status_t status, sluice_binding_t* counts) {
  char text[256] = "";
  status = sluice_take_refusal(pass->context, status, text, sizeof text);
  const sluice_proposal_t proposal = {
      .direction = direction,
      .num_chunks = 1,
      .comm_hash = status == SLUICE_OK ? sluice_pass_comm_hash(pass) : 0,
      .num_tokens = status == SLUICE_OK ? pass->binding.num_tokens : 0,
      .local_status = status,
      .local_message = text,
  };
  sluice_handshake_t handshake;
  sluice_status_t agreed = sluice_handshake(pass->moe, &proposal, status == SLUICE_OK ? counts : NULL, &handshake);
  pass->agreed_ns = handshake.agreed_ns;
  return agreed;
}

static sluice_status_t run(sluice_pass_t* pass, void* const* given) {
  SLUICE_TRY(sluice_pass_measure(pass));
  SLUICE_TRY(sluice_pass_prepare(pass, given));
  return sluice_pass_run(pass);
}

/* ---- dispatch ---- */

static sluice_status_t receive(sluice_pass_t* pass, sluice_dispatch_t* dispatch) {
  SLUICE_TRY(sluice_binding_finish(&pass->binding));
  const uint64_t bytes[SLUICE_SAVED_COUNT] = {
      [SLUICE_SAVED_META] = sluice_binding_meta_bytes(&pass->binding),
      [SLUICE_SAVED_INPUT] = (uint64_t)pass->binding.num_rows * sluice_row_bytes(&pass->moe->shape, SLUICE_T_DI),
  };
  SLUICE_TRY(sluice_step_new(pass->moe, &dispatch->step));
  SLUICE_TRY(sluice_step_allocate(dispatch->step, bytes, NULL, NULL, NULL, 0));
  sluice_binding_save(&pass->binding, bytes, dispatch->step->saved[SLUICE_SAVED_META]);
  dispatch->num_rows = pass->binding.num_rows;
  void* given[SLUICE_T_COUNT] = {NULL};
  given[SLUICE_T_DI] = dispatch->step->saved[SLUICE_SAVED_INPUT];
  return run(pass, given);
}

sluice_status_t sluice_part_dispatch(sluice_moe_t* moe, const sluice_tensor_t* tokens,
                                     const sluice_tensor_t* expert_ids, sluice_status_t refusal,
                                     sluice_dispatch_t** out_dispatch) {
  sluice_pass_t pass = pass_of(moe, SLUICE_FORWARD);
  sluice_dispatch_t* dispatch = NULL;
  sluice_status_t status = refusal;
  if (status == SLUICE_OK) {
    dispatch = sluice_alloc_zeroed(&moe->context->allocator, sizeof *dispatch, "dispatch");
    if (dispatch == NULL) status = sluice_alloc_status();
  }
  const sluice_template_spec_t spec = spec_of(moe, SLUICE_FORWARD, SLUICE_PART_DISPATCH);
  if (status == SLUICE_OK) status = sluice_engine_template(moe->context, &spec, &pass.schedule);
  if (status == SLUICE_OK) status = sluice_binding_route(moe, expert_ids, 1, NULL, &pass.binding);
  pass.in_rows = tokens;
  status = agree(&pass, SLUICE_FORWARD, status, &pass.binding);
  if (status == SLUICE_OK && dispatch != NULL) {
    status = receive(&pass, dispatch);
    if (status != SLUICE_OK) status = sluice_fail_pass(moe->context, status, pass.is_complete);
  }
  if (status != SLUICE_OK) {
    if (dispatch != NULL) sluice_step_drop(dispatch->step);
    sluice_free(&moe->context->allocator, dispatch, sizeof *dispatch);
    return status;
  }
  *out_dispatch = dispatch;
  return SLUICE_OK;
}

void sluice_part_destroy(sluice_dispatch_t* dispatch) {
  if (dispatch == NULL) return;
  sluice_moe_t* moe = dispatch->step->moe;
  sluice_layer_retain(moe);
  sluice_step_drop(dispatch->step);
  sluice_free(&moe->context->allocator, dispatch, sizeof *dispatch);
  sluice_layer_release(moe);
}

/* ---- the collective parts that follow a dispatch ---- */

typedef struct follow_s {
  int32_t direction;
  int32_t part;
  const sluice_tensor_t* host_rows; /* of T tokens, or NULL */
} follow_t;

static sluice_status_t follow(sluice_pass_t* pass, sluice_dispatch_t* dispatch, const follow_t* f,
                              sluice_status_t refusal, void* const* given) {
  sluice_step_t* step = dispatch->step;
  sluice_status_t status = refusal;
  if (status == SLUICE_OK) {
    status = sluice_binding_restore(pass->moe, pass->stream, step->saved[SLUICE_SAVED_META],
                                    step->saved_bytes[SLUICE_SAVED_META], NULL, &pass->binding);
  }
  if (status == SLUICE_OK && f->host_rows != NULL && f->host_rows->shape[0] != pass->binding.num_tokens) {
    status = SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT, "layer %d: a tensor has %lld rows, but the dispatch had %lld tokens",
        pass->moe->shape.config.layer_id, (long long)f->host_rows->shape[0], (long long)pass->binding.num_tokens);
  }
  const sluice_template_spec_t spec = spec_of(pass->moe, f->direction, f->part);
  if (status == SLUICE_OK) status = sluice_engine_template(pass->context, &spec, &pass->schedule);
  SLUICE_TRY(agree(pass, f->direction, status, NULL));
  status = run(pass, given);
  return status == SLUICE_OK ? SLUICE_OK : sluice_fail_pass(pass->context, status, pass->is_complete);
}

/* Templates only read tensors that the host gives as const; slots have one pointer type. */
static void* as_slot(const void* rows) { return (void*)(uintptr_t)rows; }

sluice_status_t sluice_part_combine(sluice_dispatch_t* dispatch, const void* rows, const sluice_tensor_t* route_weights,
                                    const sluice_tensor_t* out_tokens, sluice_status_t refusal) {
  sluice_pass_t pass = pass_of(dispatch->step->moe, SLUICE_FORWARD);
  pass.route_weights = route_weights;
  pass.out_rows = out_tokens;
  void* given[SLUICE_T_COUNT] = {NULL};
  given[SLUICE_T_DO] = as_slot(rows);
  return follow(&pass, dispatch, &(follow_t){SLUICE_FORWARD, SLUICE_PART_COMBINE, out_tokens}, refusal, given);
}

sluice_status_t sluice_part_combine_backward(sluice_dispatch_t* dispatch, const void* rows,
                                             const sluice_tensor_t* route_weights, const sluice_tensor_t* grad_out,
                                             void* grad_rows, float* grad_weight_rows, sluice_status_t refusal) {
  sluice_pass_t pass = pass_of(dispatch->step->moe, SLUICE_BACKWARD);
  const sluice_moe_config_t* c = &pass.moe->shape.config;
  pass.route_weights = route_weights;
  pass.in_rows = grad_out;
  void* given[SLUICE_T_COUNT] = {NULL};
  given[SLUICE_T_DDO] = grad_rows;
  SLUICE_TRY(follow(&pass, dispatch, &(follow_t){SLUICE_BACKWARD, SLUICE_PART_DISPATCH, grad_out}, refusal, given));
  const sluice_kernels_t* kernels = pass.context->device->kernels;
  if (grad_weight_rows != NULL) {
    kernels->dot_rows(NULL, c->dtype, pass.binding.num_rows, c->model_width, grad_rows, rows, c->model_width, 0,
                      grad_weight_rows);
  }
  if (pass.binding.num_rows > 0) {
    kernels->scale_rows(NULL, c->dtype, pass.binding.num_rows, c->model_width, grad_rows,
                        (const float*)(const void*)pass.slots[SLUICE_T_ROUTE].data, grad_rows);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_part_dispatch_backward(sluice_dispatch_t* dispatch, const void* grad_input_rows,
                                              const float* grad_weight_rows, const sluice_tensor_t* grad_tokens,
                                              const sluice_tensor_t* grad_route_weights, sluice_status_t refusal) {
  sluice_pass_t pass = pass_of(dispatch->step->moe, SLUICE_BACKWARD);
  pass.out_rows = grad_tokens;
  pass.grad_route_weights = grad_route_weights; /* of this rank's tokens: a rank without rows has some too */
  void* given[SLUICE_T_COUNT] = {NULL};
  given[SLUICE_T_DDI] = as_slot(grad_input_rows);
  given[SLUICE_T_DGATE] = as_slot(grad_weight_rows);
  return follow(&pass, dispatch, &(follow_t){SLUICE_BACKWARD, SLUICE_PART_COMBINE, grad_tokens}, refusal, given);
}

/* ---- experts ---- */

sluice_status_t sluice_part_experts(sluice_moe_t* moe, const void* rows, const int64_t* rows_per_expert,
                                    const sluice_expert_tensors_t* params, void* pre, void* out_rows) {
  sluice_pass_t pass = pass_of(moe, SLUICE_FORWARD);
  const sluice_template_spec_t spec = spec_of(moe, SLUICE_FORWARD, SLUICE_PART_EXPERTS);
  SLUICE_TRY(sluice_engine_template(moe->context, &spec, &pass.schedule));
  SLUICE_TRY(sluice_binding_of_rows(moe, rows_per_expert, &pass.binding));
  pass.params = params;
  void* given[SLUICE_T_COUNT] = {NULL};
  given[SLUICE_T_KEPT_DI] = as_slot(rows);
  given[SLUICE_T_KEPT_M] = pre;
  given[SLUICE_T_DO] = out_rows;
  return run(&pass, given);
}

sluice_status_t sluice_part_experts_backward(sluice_moe_t* moe, const void* rows, const void* pre,
                                             const int64_t* rows_per_expert, const sluice_expert_tensors_t* params,
                                             const void* grad_rows, void* grad_input_rows,
                                             const sluice_expert_tensors_t* grad_params, int32_t grad_mode) {
  sluice_pass_t pass = pass_of(moe, SLUICE_BACKWARD);
  sluice_template_spec_t spec = spec_of(moe, SLUICE_BACKWARD, SLUICE_PART_EXPERTS);
  spec.wgrad = grad_params != NULL ? SLUICE_WGRAD_CALL_NOW : SLUICE_WGRAD_CALL_NONE;
  SLUICE_TRY(sluice_engine_template(moe->context, &spec, &pass.schedule));
  SLUICE_TRY(sluice_binding_of_rows(moe, rows_per_expert, &pass.binding));
  pass.params = params;
  pass.grad_params = grad_params;
  pass.grad_mode = grad_mode;
  void* given[SLUICE_T_COUNT] = {NULL};
  given[SLUICE_T_KEPT_DI] = as_slot(rows);
  given[SLUICE_T_KEPT_M] = as_slot(pre);
  given[SLUICE_T_DDO] = as_slot(grad_rows);
  given[SLUICE_T_DDI] = grad_input_rows;
  SLUICE_TRY(sluice_pass_measure(&pass));
  SLUICE_TRY(sluice_pass_prepare(&pass, given));
  /* The gradients of rows already include route weights, so the weights are 1. */
  float* route = (float*)(void*)pass.slots[SLUICE_T_ROUTE].data;
  for (int64_t i = 0; i < pass.binding.num_rows; ++i) route[i] = 1.0f;
  return sluice_pass_run(&pass);
}
