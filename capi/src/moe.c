// SPDX-License-Identifier: Apache-2.0
/* The whole-layer calls. Arguments are checked here; after a refusal the collective call is still opened, so that all
 * ranks fail in the same way. */
#include <stddef.h>

#include "backend/base/structs.h"
#include "backend/moe/routing/saved_routes.h"
#include "backend/moe/run/run.h"
#include "capi/src/check_layer.h"

SLUICE_DEFINE_INIT(sluice_moe_forward_args, 0)
SLUICE_DEFINE_INIT(sluice_moe_backward_args, .parts = SLUICE_BACKWARD_BOTH)

static sluice_status_t refuse_host(const sluice_moe_t* moe, int32_t status, const char* message) {
  if (status == SLUICE_OK) return SLUICE_OK;
  return SLUICE_FAIL(status < 0 ? status : SLUICE_E_EXTERNAL, "layer %d: the host refused its input: %s",
                     moe->shape.config.layer_id, message != NULL ? message : "no reason given");
}

static sluice_status_t check_forward(const sluice_moe_t* moe, sluice_moe_forward_args_t* a, sluice_stream_t stream,
                                     sluice_step_t** out_step, sluice_expert_tensors_t* params) {
  SLUICE_TRY(refuse_host(moe, a->local_status, a->local_message));
  SLUICE_TRY(sluice_check_stream(moe, stream));
  SLUICE_TRY(sluice_struct_check_next(a->next, "sluice_moe_forward_args_t"));
  SLUICE_TRY(SLUICE_REQUIRE(!a->needs_backward || out_step != NULL,
                            "layer %d: out_step is NULL, but needs_backward is set", moe->shape.config.layer_id));
  SLUICE_TRY(sluice_check_rows(moe, a->tokens, "tokens", -1));
  int64_t num_tokens = a->tokens->shape[0];
  SLUICE_TRY(sluice_check_ids(moe, a->expert_ids, num_tokens));
  SLUICE_TRY(sluice_check_route_weights(moe, a->route_weights, "route_weights", num_tokens));
  SLUICE_TRY(sluice_check_out_rows(moe, a->out_tokens, "out_tokens", num_tokens));
  if (moe->shape.config.callback_experts) return sluice_check_callbacks(moe, a->callbacks);
  SLUICE_TRY(sluice_check_experts(moe, a->params, params));
  a->params = params;
  return SLUICE_OK;
}

sluice_status_t sluice_moe_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args, sluice_stream_t stream,
                                   sluice_step_t** out_step) {
  if (out_step != NULL) *out_step = NULL;
  if (moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_forward: moe is NULL");
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_moe_forward"));
  sluice_moe_forward_args_t checked;
  sluice_expert_tensors_t params;
  sluice_moe_forward_args_init(&checked, sizeof checked);
  sluice_status_t refusal =
      sluice_struct_copy(&checked, sizeof checked, args, offsetof(sluice_moe_forward_args_t, save_is_counted),
                         "sluice_moe_forward_args_t");
  if (refusal == SLUICE_OK) refusal = check_forward(moe, &checked, stream, out_step, &params);
  sluice_status_t status = sluice_run_forward(moe, &checked, stream, refusal, out_step);
  sluice_engine_leave(moe->context);
  return status;
}

/* The caller's tensors in the current struct layout, for the duration of a call. */
typedef struct known_tensors_s {
  sluice_expert_tensors_t params, grads;
} known_tensors_t;

static sluice_status_t check_expert_tensors(const sluice_moe_t* moe, sluice_moe_backward_args_t* a,
                                            known_tensors_t* known) {
  SLUICE_TRY(sluice_check_experts(moe, a->params, &known->params));
  a->params = &known->params;
  if ((a->parts & SLUICE_BACKWARD_WGRAD) && a->grad_params != NULL) {
    SLUICE_TRY(sluice_check_gradients(moe, a->params, a->grad_params, &known->grads));
    a->grad_params = &known->grads;
  }
  return SLUICE_REQUIRE(a->parts != SLUICE_BACKWARD_WGRAD || a->grad_params != NULL,
                        "layer %d: wgrad needs grad_params", moe->shape.config.layer_id);
}

static sluice_status_t check_backward(const sluice_moe_t* moe, const sluice_step_t* step, sluice_moe_backward_args_t* a,
                                      sluice_stream_t stream, known_tensors_t* known) {
  const sluice_moe_config_t* c = &moe->shape.config;
  SLUICE_TRY(refuse_host(moe, a->local_status, a->local_message));
  SLUICE_TRY(sluice_check_stream(moe, stream));
  SLUICE_TRY(sluice_struct_check_next(a->next, "sluice_moe_backward_args_t"));
  if (step == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: step is NULL", c->layer_id);
  if (!sluice_live_steps_has(&moe->context->live_steps, step)) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "layer %d: this step is not outstanding: it was dropped (sluice_step_drop), or is of another "
                       "context",
                       c->layer_id);
  }
  SLUICE_TRY(SLUICE_REQUIRE(step->moe == moe, "layer %d: this step is of layer %d", c->layer_id,
                            step->moe->shape.config.layer_id));
  SLUICE_TRY(SLUICE_REQUIRE(a->parts >= SLUICE_BACKWARD_DGRAD && a->parts <= SLUICE_BACKWARD_BOTH,
                            "layer %d: parts is %d; use SLUICE_BACKWARD_DGRAD, _WGRAD or _BOTH", c->layer_id,
                            a->parts));
  SLUICE_TRY(SLUICE_REQUIRE(a->grad_mode == SLUICE_GRAD_OVERWRITE || a->grad_mode == SLUICE_GRAD_ACCUMULATE,
                            "layer %d: grad_mode is %d; use SLUICE_GRAD_OVERWRITE or _ACCUMULATE", c->layer_id,
                            a->grad_mode));
  if (c->callback_experts) {
    if (a->parts != SLUICE_BACKWARD_BOTH) {
      return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "layer %d: callback experts compute dgrad and wgrad in one call",
                         c->layer_id);
    }
    SLUICE_TRY(sluice_check_callbacks(moe, a->callbacks));
  } else {
    SLUICE_TRY(check_expert_tensors(moe, a, known));
  }
  if (a->parts == SLUICE_BACKWARD_WGRAD) return SLUICE_OK;
  SLUICE_TRY(sluice_check_rows(moe, a->grad_out, "grad_out", -1));
  int64_t num_tokens = a->grad_out->shape[0];
  SLUICE_TRY(sluice_check_rows(moe, a->tokens, "tokens", num_tokens));
  SLUICE_TRY(sluice_check_route_weights(moe, a->route_weights, "route_weights", num_tokens));
  if (a->grad_tokens != NULL) SLUICE_TRY(sluice_check_out_rows(moe, a->grad_tokens, "grad_tokens", num_tokens));
  if (a->grad_route_weights != NULL) {
    SLUICE_TRY(sluice_check_out_route_weights(moe, a->grad_route_weights, "grad_route_weights", num_tokens));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_moe_backward(sluice_moe_t* moe, sluice_step_t* step, const sluice_moe_backward_args_t* args,
                                    sluice_stream_t stream) {
  if (moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_backward: moe is NULL");
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_moe_backward"));
  sluice_moe_backward_args_t checked;
  known_tensors_t known;
  sluice_moe_backward_args_init(&checked, sizeof checked);
  sluice_status_t refusal =
      sluice_struct_copy(&checked, sizeof checked, args, sizeof checked, "sluice_moe_backward_args_t");
  if (refusal == SLUICE_OK) refusal = check_backward(moe, step, &checked, stream, &known);
  sluice_status_t status = sluice_run_backward(moe, step, &checked, stream, refusal);
  sluice_engine_leave(moe->context);
  return status;
}

sluice_status_t sluice_step_restore(sluice_moe_t* moe, void* const* saved, const uint64_t* saved_bytes,
                                    sluice_step_t** out_step) {
  if (out_step == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_step_restore: out_step is NULL");
  *out_step = NULL;
  SLUICE_TRY(SLUICE_REQUIRE(moe != NULL && saved != NULL && saved_bytes != NULL, "sluice_step_restore: %s is NULL",
                            moe == NULL     ? "moe"
                            : saved == NULL ? "saved"
                                            : "saved_bytes"));
  SLUICE_TRY(sluice_engine_check_process(moe->context, "sluice_step_restore"));
  return sluice_step_from_saved(moe, saved, saved_bytes, out_step);
}

sluice_status_t sluice_step_info(const sluice_step_t* step, int32_t* out_num_chunks, int64_t* out_rows_per_expert) {
  if (step == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_step_info: step is NULL");
  SLUICE_TRY(sluice_engine_check_process(step->moe->context, "sluice_step_info"));
  return sluice_binding_peek(step->moe, step->saved[SLUICE_SAVED_META], step->saved_bytes[SLUICE_SAVED_META],
                             out_num_chunks, NULL, out_rows_per_expert);
}
