// SPDX-License-Identifier: Apache-2.0
/* The public calls for the parts of a layer: check the arguments, then call backend/moe. */
#include "backend/moe/run/split.h"

#include "capi/src/check_layer.h"

#define FAIL_NULL(function, name) SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: %s is NULL", function, name)

static sluice_status_t check_dispatch(const sluice_moe_t* moe, const sluice_tensor_t* tokens,
                                      const sluice_tensor_t* expert_ids, sluice_stream_t stream) {
  SLUICE_TRY(sluice_check_is_near(moe->context, "sluice_dispatch_forward"));
  SLUICE_TRY(sluice_check_is_exact(moe, "sluice_dispatch_forward"));
  SLUICE_TRY(sluice_check_sends_rows(moe, "sluice_dispatch_forward"));
  SLUICE_TRY(sluice_check_stream(moe, stream));
  SLUICE_TRY(sluice_check_rows(moe, tokens, "tokens", -1));
  return sluice_check_ids(moe, expert_ids, tokens->shape[0]);
}

sluice_status_t sluice_dispatch_forward(sluice_moe_t* moe, const sluice_tensor_t* tokens,
                                        const sluice_tensor_t* expert_ids, sluice_stream_t stream,
                                        sluice_dispatch_t** out_dispatch) {
  if (out_dispatch == NULL) return FAIL_NULL("sluice_dispatch_forward", "out_dispatch");
  *out_dispatch = NULL;
  if (moe == NULL) return FAIL_NULL("sluice_dispatch_forward", "moe");
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_dispatch_forward"));
  sluice_status_t refusal = check_dispatch(moe, tokens, expert_ids, stream);
  sluice_status_t status = sluice_part_dispatch(moe, tokens, expert_ids, refusal, out_dispatch);
  sluice_engine_leave(moe->context);
  return status;
}

sluice_status_t sluice_dispatch_rows(const sluice_dispatch_t* dispatch, void** out_rows, int64_t* out_num_rows,
                                     int64_t* out_rows_per_expert) {
  if (dispatch == NULL) return FAIL_NULL("sluice_dispatch_rows", "dispatch");
  if (out_rows != NULL) *out_rows = dispatch->step->saved[SLUICE_SAVED_INPUT];
  if (out_num_rows != NULL) *out_num_rows = dispatch->num_rows;
  return sluice_step_info(dispatch->step, NULL, out_rows_per_expert);
}

/* rows: may be NULL only if there are none. */
static sluice_status_t check_follow(const sluice_dispatch_t* dispatch, const void* rows, const char* rows_name,
                                    sluice_stream_t stream) {
  SLUICE_TRY(sluice_check_stream(dispatch->step->moe, stream));
  return SLUICE_REQUIRE(rows != NULL || dispatch->num_rows == 0,
                        "layer %d: %s is NULL, but this dispatch has %lld rows",
                        dispatch->step->moe->shape.config.layer_id, rows_name, (long long)dispatch->num_rows);
}

static sluice_status_t check_combine(const sluice_dispatch_t* dispatch, const void* rows,
                                     const sluice_tensor_t* route_weights, const sluice_tensor_t* out_tokens,
                                     sluice_stream_t stream) {
  const sluice_moe_t* moe = dispatch->step->moe;
  SLUICE_TRY(check_follow(dispatch, rows, "rows", stream));
  SLUICE_TRY(sluice_check_out_rows(moe, out_tokens, "out_tokens", -1));
  return sluice_check_route_weights(moe, route_weights, "route_weights", out_tokens->shape[0]);
}

sluice_status_t sluice_dispatch_combine(sluice_dispatch_t* dispatch, const void* rows,
                                        const sluice_tensor_t* route_weights, const sluice_tensor_t* out_tokens,
                                        sluice_stream_t stream) {
  if (dispatch == NULL) return FAIL_NULL("sluice_dispatch_combine", "dispatch");
  sluice_context_t* context = dispatch->step->moe->context;
  SLUICE_TRY(sluice_engine_enter(context, "sluice_dispatch_combine"));
  sluice_status_t refusal = check_combine(dispatch, rows, route_weights, out_tokens, stream);
  sluice_status_t status = sluice_part_combine(dispatch, rows, route_weights, out_tokens, refusal);
  sluice_engine_leave(context);
  return status;
}

/* rows: only read for grad_weight_rows. */
static sluice_status_t check_combine_backward(const sluice_dispatch_t* dispatch, const void* rows,
                                              const sluice_tensor_t* route_weights, const sluice_tensor_t* grad_out,
                                              const void* grad_rows, const float* grad_weight_rows,
                                              sluice_stream_t stream) {
  const sluice_moe_t* moe = dispatch->step->moe;
  if (grad_weight_rows != NULL) SLUICE_TRY(check_follow(dispatch, rows, "rows", stream));
  SLUICE_TRY(check_follow(dispatch, grad_rows, "grad_rows", stream));
  SLUICE_TRY(sluice_check_rows(moe, grad_out, "grad_out", -1));
  return sluice_check_route_weights(moe, route_weights, "route_weights", grad_out->shape[0]);
}

sluice_status_t sluice_dispatch_combine_backward(sluice_dispatch_t* dispatch, const void* rows,
                                                 const sluice_tensor_t* route_weights, const sluice_tensor_t* grad_out,
                                                 void* grad_rows, float* grad_weight_rows, sluice_stream_t stream) {
  if (dispatch == NULL) return FAIL_NULL("sluice_dispatch_combine_backward", "dispatch");
  sluice_context_t* context = dispatch->step->moe->context;
  SLUICE_TRY(sluice_engine_enter(context, "sluice_dispatch_combine_backward"));
  sluice_status_t refusal =
      check_combine_backward(dispatch, rows, route_weights, grad_out, grad_rows, grad_weight_rows, stream);
  sluice_status_t status =
      sluice_part_combine_backward(dispatch, rows, route_weights, grad_out, grad_rows, grad_weight_rows, refusal);
  sluice_engine_leave(context);
  return status;
}

static sluice_status_t check_dispatch_backward(const sluice_dispatch_t* dispatch, const void* grad_input_rows,
                                               const float* grad_weight_rows, const sluice_tensor_t* grad_tokens,
                                               const sluice_tensor_t* grad_route_weights, sluice_stream_t stream) {
  const sluice_moe_t* moe = dispatch->step->moe;
  SLUICE_TRY(check_follow(dispatch, grad_input_rows, "grad_input_rows", stream));
  SLUICE_TRY(sluice_check_out_rows(moe, grad_tokens, "grad_tokens", -1));
  if (grad_route_weights == NULL) return SLUICE_OK;
  SLUICE_TRY(check_follow(dispatch, grad_weight_rows, "grad_weight_rows", stream));
  return sluice_check_out_route_weights(moe, grad_route_weights, "grad_route_weights", grad_tokens->shape[0]);
}

sluice_status_t sluice_dispatch_backward(sluice_dispatch_t* dispatch, const void* grad_input_rows,
                                         const float* grad_weight_rows, const sluice_tensor_t* grad_tokens,
                                         const sluice_tensor_t* grad_route_weights, sluice_stream_t stream) {
  if (dispatch == NULL) return FAIL_NULL("sluice_dispatch_backward", "dispatch");
  sluice_context_t* context = dispatch->step->moe->context;
  SLUICE_TRY(sluice_engine_enter(context, "sluice_dispatch_backward"));
  sluice_status_t refusal =
      check_dispatch_backward(dispatch, grad_input_rows, grad_weight_rows, grad_tokens, grad_route_weights, stream);
  sluice_status_t status = sluice_part_dispatch_backward(dispatch, grad_input_rows, grad_weight_rows, grad_tokens,
                                                         grad_route_weights, refusal);
  sluice_engine_leave(context);
  return status;
}

void sluice_dispatch_destroy(sluice_dispatch_t* dispatch) { sluice_part_destroy(dispatch); }

/* ---- experts ---- */

static sluice_status_t check_experts_call(const sluice_moe_t* moe, const int64_t* rows_per_expert,
                                          const sluice_expert_tensors_t* params, sluice_stream_t stream,
                                          sluice_expert_tensors_t* out_params) {
  SLUICE_TRY(sluice_check_is_near(moe->context, "the experts of a layer alone"));
  SLUICE_TRY(sluice_check_stream(moe, stream));
  if (moe->shape.config.callback_experts) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: its experts are the host's own (callback_experts); call them directly",
                       moe->shape.config.layer_id);
  }
  SLUICE_TRY(SLUICE_REQUIRE(rows_per_expert != NULL, "layer %d: rows_per_expert is NULL", moe->shape.config.layer_id));
  return sluice_check_experts(moe, params, out_params);
}

static sluice_status_t check_pointers(const sluice_moe_t* moe, const int64_t* rows_per_expert,
                                      const void* const* pointers, const char* const* names, int32_t count) {
  int32_t busy = 0; /* the first expert with rows; the range of counts is checked when they are bound */
  while (busy < moe->shape.num_local && rows_per_expert[busy] <= 0) ++busy;
  for (int32_t i = 0; i < count && busy < moe->shape.num_local; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(pointers[i] != NULL, "layer %d: %s is NULL, but local expert %d has %lld rows",
                              moe->shape.config.layer_id, names[i], busy, (long long)rows_per_expert[busy]));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_experts_forward(sluice_moe_t* moe, const void* rows, const int64_t* rows_per_expert,
                                       const sluice_expert_tensors_t* params, void* pre, void* out_rows,
                                       sluice_stream_t stream) {
  if (moe == NULL) return FAIL_NULL("sluice_experts_forward", "moe");
  sluice_expert_tensors_t known;
  SLUICE_TRY(check_experts_call(moe, rows_per_expert, params, stream, &known));
  const void* const pointers[] = {rows, out_rows};
  static const char* const names[] = {"rows", "out_rows"};
  SLUICE_TRY(check_pointers(moe, rows_per_expert, pointers, names, 2));
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_experts_forward"));
  sluice_status_t status = sluice_part_experts(moe, rows, rows_per_expert, &known, pre, out_rows);
  sluice_engine_leave(moe->context);
  return status;
}

sluice_status_t sluice_experts_backward(sluice_moe_t* moe, const void* rows, const void* pre,
                                        const int64_t* rows_per_expert, const sluice_expert_tensors_t* params,
                                        const void* grad_rows, void* grad_input_rows,
                                        const sluice_expert_tensors_t* grad_params, int32_t grad_mode,
                                        sluice_stream_t stream) {
  if (moe == NULL) return FAIL_NULL("sluice_experts_backward", "moe");
  sluice_expert_tensors_t known;
  SLUICE_TRY(check_experts_call(moe, rows_per_expert, params, stream, &known));
  const void* const pointers[] = {rows, pre, grad_rows};
  static const char* const names[] = {"rows", "pre", "grad_rows"};
  SLUICE_TRY(check_pointers(moe, rows_per_expert, pointers, names, 3));
  sluice_expert_tensors_t grads;
  if (grad_params != NULL) SLUICE_TRY(sluice_check_gradients(moe, &known, grad_params, &grads));
  SLUICE_TRY(SLUICE_REQUIRE(grad_mode == SLUICE_GRAD_OVERWRITE || grad_mode == SLUICE_GRAD_ACCUMULATE,
                            "layer %d: grad_mode is %d; use SLUICE_GRAD_OVERWRITE or _ACCUMULATE",
                            moe->shape.config.layer_id, grad_mode));
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_experts_backward"));
  sluice_status_t status =
      sluice_part_experts_backward(moe, rows, pre, rows_per_expert, &known, grad_rows, grad_input_rows,
                                   grad_params != NULL ? &grads : NULL, grad_mode);
  sluice_engine_leave(moe->context);
  return status;
}
