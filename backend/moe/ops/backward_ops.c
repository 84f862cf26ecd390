// SPDX-License-Identifier: Apache-2.0
/* The ops of a backward pass. With dy the output gradient of a row, w its route weight, a = f(T_M):
 *   dT_ACT = dy W2            dgate = dT_ACT . a (+ dy . b2)       the gradient of w
 *   dT_M   = w f'(T_M) dT_ACT dT_DI = dT_M [W1; W3]
 *   dW2   += dy^T (w a)       dW1, dW3 += dT_M^T T_DI              db1, db3 += sum dT_M, db2 += sum w dy
 * With adapters each W is W + s B A, and dA and dB take the place of dW (low_rank.h). */
#include "backend/base/dtype.h"
#include "backend/moe/ops/exchange_ops.h"
#include "backend/moe/ops/expert_math.h"
#include "backend/moe/ops/low_rank.h"
#include "backend/moe/ops/run_op.h"
#include "backend/moe/ops/travel.h"
#include "backend/moe/pass/weight_sums.h"

static sluice_status_t gemm2_grad(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  uint64_t element = sluice_dtype_bytes(c->dtype);
  int64_t count = 0;
  float beta = 0;
  SLUICE_TRY(sluice_low_backward(pass, op, SLUICE_LINEAR_DOWN, &beta));
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
    if (rows == 0) continue;
    pass->gemms[count] = (sluice_gemm_problem_t){
        rows,
        c->hidden_width,
        c->model_width,
        sluice_rows_matrix(sluice_pass_rows(pass, SLUICE_T_DDO, op->chunk, e), c->model_width, 0, element),
        sluice_weight(pass, count, SLUICE_W2, e, 0),
        sluice_rows_matrix(sluice_pass_rows(pass, SLUICE_T_DACT, op->chunk, e), c->hidden_width, 0, element)};
    ++count;
  }
  return sluice_grouped_gemm_run(pass, op, count, c->dtype, beta);
}

/* dgate += dy . b2 */
static void add_bias_to_gate(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
    if (rows == 0) continue;
    pass->context->device->kernels->dot_rows(sluice_pass_stream(pass, op), c->dtype, rows, c->model_width,
                                             sluice_pass_rows(pass, SLUICE_T_DDO, op->chunk, e),
                                             sluice_tensor_data(&pass->params->b2[e]), 0, 1,
                                             sluice_pass_rows(pass, SLUICE_T_DGATE, op->chunk, e));
  }
}

static void activation_grad_of_all(sluice_pass_t* pass, const sluice_op_t* op, int is_wanted) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_unit_t unit = sluice_layer_unit(c);
  const sluice_expert_rows_t rows = sluice_pass_expert_rows(pass, op->chunk);
  const sluice_rows_at_t dact = sluice_pass_rows_at(pass, SLUICE_T_DACT, op->chunk), none = {NULL, 0, 0};
  pass->context->device->kernels->experts_backward(
      sluice_pass_stream(pass, op), c->dtype, &unit, &rows, c->hidden_width,
      sluice_pass_rows_at(pass, SLUICE_T_M, op->chunk), dact, sluice_pass_rows_at(pass, SLUICE_T_ROUTE, op->chunk),
      sluice_pass_rows_at(pass, SLUICE_T_DM, op->chunk), is_wanted ? dact : none,
      sluice_pass_rows_at(pass, SLUICE_T_DGATE, op->chunk));
}

static void activation_grad_of(sluice_pass_t* pass, const sluice_op_t* op, int is_wanted, int32_t e) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const sluice_unit_t unit = sluice_layer_unit(c);
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
  if (rows == 0) return;
  float* dgate = sluice_pass_rows(pass, SLUICE_T_DGATE, op->chunk, e);
  const void* pre = sluice_pass_rows(pass, SLUICE_T_M, op->chunk, e);
  void* dact = sluice_pass_rows(pass, SLUICE_T_DACT, op->chunk, e);
  const float* weight = sluice_pass_rows(pass, SLUICE_T_ROUTE, op->chunk, e);
  void* dpre = sluice_pass_rows(pass, SLUICE_T_DM, op->chunk, e);
  void* act_w = is_wanted ? dact : NULL;
  kernels->unit_backward(stream, c->dtype, &unit, rows, c->hidden_width, pre, dact, weight, dpre, act_w, dgate);
}

static void activation_grad(sluice_pass_t* pass, const sluice_op_t* op) {
  int is_wanted = pass->schedule->spec.wgrad == SLUICE_WGRAD_CALL_LATER || pass->grad_params != NULL;
  if (pass->context->device->kernels->experts_backward != NULL) {
    activation_grad_of_all(pass, op, is_wanted);
  } else {
    for (int32_t e = 0; e < pass->binding.num_local; ++e) activation_grad_of(pass, op, is_wanted, e);
  }
  if (pass->moe->shape.config.bias) add_bias_to_gate(pass, op);
}

/* dT_DI = dT_M[:, :H] W1 (+ dT_M[:, H:] W3). Where W1 and W3 are one matrix, one GEMM rounds once. */
static sluice_status_t gemm1_grad(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  uint64_t element = sluice_dtype_bytes(c->dtype);
  int64_t width = pass->moe->shape.gate_factor * c->hidden_width;
  float beta = 0;
  SLUICE_TRY(sluice_low_backward(pass, op, SLUICE_LINEAR_UP, &beta));
  for (int32_t half = 0; half < pass->moe->shape.gate_factor; ++half) {
    int64_t count = 0;
    for (int32_t e = 0; e < pass->binding.num_local; ++e) {
      int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
      int fused = c->gated && sluice_gate_up_is_fused(pass, e);
      if (rows == 0 || (half == 1 && fused)) continue;
      pass->gemms[count] = (sluice_gemm_problem_t){
          rows,
          c->model_width,
          fused ? 2 * c->hidden_width : c->hidden_width,
          sluice_rows_matrix(sluice_pass_rows(pass, SLUICE_T_DM, op->chunk, e), width, half * c->hidden_width, element),
          sluice_weight(pass, count, half == 0 ? SLUICE_W1 : SLUICE_W3, e, 0),
          sluice_rows_matrix(sluice_pass_rows(pass, SLUICE_T_DDI, op->chunk, e), c->model_width, 0, element)};
      ++count;
    }
    SLUICE_TRY(sluice_grouped_gemm_run(pass, op, count, c->dtype, half == 0 ? beta : 1));
  }
  return SLUICE_OK;
}

static sluice_status_t host_expert_grad(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
    if (rows == 0) continue;
    void* dy = sluice_pass_rows(pass, SLUICE_T_DDO, op->chunk, e);
    kernels->dot_rows(stream, c->dtype, rows, c->model_width, dy, sluice_pass_rows(pass, SLUICE_T_DO, op->chunk, e),
                      c->model_width, 0, sluice_pass_rows(pass, SLUICE_T_DGATE, op->chunk, e));
    kernels->scale_rows(stream, c->dtype, rows, c->model_width, dy,
                        sluice_pass_rows(pass, SLUICE_T_ROUTE, op->chunk, e), dy);
    int32_t result = pass->callbacks->backward(pass->callbacks->user, op->chunk, e, rows,
                                               sluice_pass_rows(pass, SLUICE_T_DI, op->chunk, e), dy,
                                               sluice_pass_rows(pass, SLUICE_T_DDI, op->chunk, e));
    if (result != 0) {
      return SLUICE_FAIL(SLUICE_E_EXTERNAL,
                         "layer %d: the host's expert %d failed in backward of chunk %d (it returned %d)", c->layer_id,
                         e, op->chunk, result);
    }
  }
  return SLUICE_OK;
}

static void write_route_gradients(sluice_pass_t* pass, const sluice_op_t* op, sluice_token_span_t tokens) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_tensor_t* out = pass->grad_route_weights;
  const float* scalars = b->world_size == 1 ? sluice_pass_chunk(pass, SLUICE_T_DGATE, tokens.chunk) : pass->gate_recv;
  int64_t t = tokens.first, stride = sluice_tensor_stride(out, 0);
  pass->context->device->kernels->spread_scalars(
      sluice_pass_stream(pass, op), tokens.count, b->top_k, scalars, b->position + t * b->top_k,
      (float*)sluice_tensor_data(out) + t * stride, stride, sluice_tensor_stride(out, 1));
}

static void reduce_grad(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_token_span_t tokens = sluice_tokens_of(&pass->binding, op->chunk);
  if (tokens.count == 0) return;
  if (pass->out_rows != NULL) pass->travel->reduce(pass, op, SLUICE_T_DDI);
  if (pass->grad_route_weights != NULL) write_route_gradients(pass, op, tokens);
}

sluice_status_t sluice_run_backward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  switch (op->kind) {
    case SLUICE_OP_DISPATCH_GRAD:
    case SLUICE_OP_COMBINE_GRAD:
    case SLUICE_OP_REDISPATCH: return sluice_run_exchange(pass, op, index);
    case SLUICE_OP_UNPACK_GRAD: return sluice_unpack(pass, op, pass->in_rows, SLUICE_T_DDO);
    case SLUICE_OP_GEMM2_GRAD: return gemm2_grad(pass, op);
    case SLUICE_OP_ACTIVATION_GRAD: activation_grad(pass, op); return SLUICE_OK;
    case SLUICE_OP_GEMM1_GRAD: return gemm1_grad(pass, op);
    case SLUICE_OP_EXPERT_GRAD: return host_expert_grad(pass, op);
    case SLUICE_OP_REDUCE_GRAD: reduce_grad(pass, op); return SLUICE_OK;
    case SLUICE_OP_WEIGHT_GRAD: return sluice_weight_grad(pass, op);
    case SLUICE_OP_COPY_IN: return sluice_copy(pass, op, index);
    case SLUICE_OP_UNPACK: return sluice_unpack(pass, op, pass->tokens, SLUICE_T_DI);
    case SLUICE_OP_NODE_DISPATCH: return sluice_node_dispatch(pass, op, index, pass->tokens);
    case SLUICE_OP_NODE_DISPATCH_GRAD: return sluice_node_dispatch(pass, op, index, pass->in_rows);
    case SLUICE_OP_NODE_COMBINE_GRAD: return sluice_node_combine(pass, op, index, SLUICE_T_DDI);
    case SLUICE_OP_RECOMPUTE: return sluice_recompute(pass, op);
    case SLUICE_OP_EXPERT: return sluice_host_expert(pass, op);
    default:
      return SLUICE_FAIL(SLUICE_E_INTERNAL, "backward: op %s is not an op of a backward", sluice_op_name(op->kind));
  }
}
