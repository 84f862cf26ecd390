// SPDX-License-Identifier: Apache-2.0
/* The ops of a forward pass. Equations per row x of expert e, in expert order:
 *   T_M = [W1 x + b1 | W3 x + b3],  T_DO = W2 f(T_M) + b2,  y[t] = sum over k of w[t,k] T_DO(t, k).
 * With adapters each W is W + s B A (low_rank.h). */
#include "backend/base/dtype.h"
#include "backend/moe/ops/exchange_ops.h"
#include "backend/moe/ops/expert_math.h"
#include "backend/moe/ops/low_rank.h"
#include "backend/moe/ops/run_op.h"
#include "backend/moe/ops/travel.h"
#include "backend/moe/pass/weight_sums.h"

static sluice_status_t unpack(sluice_pass_t* pass, const sluice_op_t* op) {
  SLUICE_TRY(sluice_unpack(pass, op, pass->in_rows, SLUICE_T_DI));
  if (pass->travel->unpack_weights != NULL) pass->travel->unpack_weights(pass, op);
  return SLUICE_OK;
}

static sluice_status_t gemm1(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  uint64_t element = sluice_dtype_bytes(c->dtype);
  int64_t width = pass->moe->shape.gate_factor * c->hidden_width;
  int64_t count = 0;
  float beta = 0;
  SLUICE_TRY(sluice_low_forward(pass, op, SLUICE_LINEAR_UP, &beta));
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
    if (rows == 0) continue;
    sluice_matrix_t x =
        sluice_rows_matrix(sluice_pass_rows(pass, SLUICE_T_DI, op->chunk, e), c->model_width, 0, element);
    void* pre = sluice_pass_rows(pass, SLUICE_T_M, op->chunk, e);
    int fused = c->gated && sluice_gate_up_is_fused(pass, e);
    pass->gemms[count] = (sluice_gemm_problem_t){
        rows, fused ? 2 * c->hidden_width : c->hidden_width, c->model_width,
        x,    sluice_weight(pass, count, SLUICE_W1, e, 1),   sluice_rows_matrix(pre, width, 0, element)};
    ++count;
    if (!c->gated || fused) continue;
    pass->gemms[count] = (sluice_gemm_problem_t){rows,
                                                 c->hidden_width,
                                                 c->model_width,
                                                 x,
                                                 sluice_weight(pass, count, SLUICE_W3, e, 1),
                                                 sluice_rows_matrix(pre, width, c->hidden_width, element)};
    ++count;
  }
  return sluice_grouped_gemm_run(pass, op, count, c->dtype, beta);
}

static const void* bias_of(const sluice_tensor_t* biases, int32_t local) {
  return biases == NULL ? NULL : sluice_tensor_data(&biases[local]);
}

/* `out`: T_ACT, or scratch if only the biases are to be added to T_M. */
static void activation(sluice_pass_t* pass, const sluice_op_t* op, int32_t out) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const sluice_unit_t unit = sluice_layer_unit(c);
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  if (kernels->experts_forward != NULL) {
    const sluice_expert_rows_t rows = sluice_pass_expert_rows(pass, op->chunk);
    kernels->experts_forward(stream, c->dtype, &unit, &rows, c->hidden_width,
                             sluice_pass_rows_at(pass, SLUICE_T_M, op->chunk), c->bias ? pass->params->b1 : NULL,
                             c->bias && c->gated == SLUICE_GATED_HALVES ? pass->params->b3 : NULL,
                             sluice_pass_rows_at(pass, out, op->chunk));
    return;
  }
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
    if (rows == 0) continue;
    void* pre = sluice_pass_rows(pass, SLUICE_T_M, op->chunk, e);
    void* act = sluice_pass_rows(pass, out, op->chunk, e);
    const void* b1 = c->bias ? bias_of(pass->params->b1, e) : NULL;
    const void* b3 = c->bias && c->gated == SLUICE_GATED_HALVES ? bias_of(pass->params->b3, e) : NULL;
    kernels->unit_forward(stream, c->dtype, &unit, rows, c->hidden_width, pre, b1, b3, act);
  }
}

sluice_status_t sluice_recompute(sluice_pass_t* pass, const sluice_op_t* op) {
  SLUICE_TRY(gemm1(pass, op));
  if (pass->moe->shape.config.bias) activation(pass, op, SLUICE_T_DACT);
  return SLUICE_OK;
}

static sluice_status_t gemm2(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  uint64_t element = sluice_dtype_bytes(c->dtype);
  int64_t count = 0;
  float beta = 0;
  SLUICE_TRY(sluice_low_forward(pass, op, SLUICE_LINEAR_DOWN, &beta));
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
    if (rows == 0) continue;
    pass->gemms[count] = (sluice_gemm_problem_t){
        rows,
        c->model_width,
        c->hidden_width,
        sluice_rows_matrix(sluice_pass_rows(pass, SLUICE_T_ACT, op->chunk, e), c->hidden_width, 0, element),
        sluice_weight(pass, count, SLUICE_W2, e, 1),
        sluice_rows_matrix(sluice_pass_rows(pass, SLUICE_T_DO, op->chunk, e), c->model_width, 0, element)};
    ++count;
  }
  SLUICE_TRY(sluice_grouped_gemm_run(pass, op, count, c->dtype, beta));
  if (!c->bias) return SLUICE_OK;
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    pass->context->device->kernels->add_bias(
        sluice_pass_stream(pass, op), c->dtype, sluice_rows_of_expert(pass, op->chunk, e), c->model_width,
        sluice_pass_rows(pass, SLUICE_T_DO, op->chunk, e), bias_of(pass->params->b2, e));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_host_expert(sluice_pass_t* pass, const sluice_op_t* op) {
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t rows = sluice_rows_of_expert(pass, op->chunk, e);
    if (rows == 0) continue;
    int32_t result = pass->callbacks->forward(pass->callbacks->user, op->chunk, e, rows,
                                              sluice_pass_rows(pass, SLUICE_T_DI, op->chunk, e),
                                              sluice_pass_rows(pass, SLUICE_T_DO, op->chunk, e));
    if (result != 0) {
      return SLUICE_FAIL(SLUICE_E_EXTERNAL,
                         "layer %d: the host's expert %d failed in forward of chunk %d (it returned %d)",
                         pass->moe->shape.config.layer_id, e, op->chunk, result);
    }
  }
  return SLUICE_OK;
}

/* The tensor whose policy the copy carries out: T_DI or the pre-activation. */
static int32_t copied_tensor(const sluice_op_t* op, int32_t* out_host) {
  int32_t host = op->kind == SLUICE_OP_COPY_OUT ? op->writes[0].tensor : op->reads[0].tensor;
  *out_host = host;
  return host == SLUICE_T_HOST_DI ? SLUICE_T_DI : SLUICE_T_M;
}

sluice_status_t sluice_copy(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  const sluice_binding_t* b = &pass->binding;
  int32_t host = 0, tensor = copied_tensor(op, &host);
  sluice_context_t* context = pass->context;
  int out = op->kind == SLUICE_OP_COPY_OUT;
  uint64_t row_bytes = pass->slots[tensor].row_bytes;
  for (int32_t e = 0; e < b->num_local; ++e) {
    uint64_t bytes = (uint64_t)sluice_rows_of_expert(pass, op->chunk, e) * row_bytes;
    if (bytes == 0) continue;
    void* slot = sluice_pass_rows(pass, tensor, op->chunk, e);
    void* pool = sluice_pass_rows(pass, host, op->chunk, e);
    SLUICE_TRY(context->rows->copy(context, sluice_pass_stream(pass, op), out ? pool : slot, out ? slot : pool, bytes));
    pass->times[index].bytes += bytes;
  }
  return SLUICE_OK;
}

static void reduce(sluice_pass_t* pass, const sluice_op_t* op) {
  if (sluice_tokens_of(&pass->binding, op->chunk).count > 0) pass->travel->reduce(pass, op, SLUICE_T_DO);
}

sluice_status_t sluice_run_forward_op(sluice_pass_t* pass, const sluice_op_t* op, int32_t index) {
  switch (op->kind) {
    case SLUICE_OP_DISPATCH:
    case SLUICE_OP_COMBINE: return sluice_run_exchange(pass, op, index);
    case SLUICE_OP_UNPACK: return unpack(pass, op);
    case SLUICE_OP_GEMM1: return gemm1(pass, op);
    case SLUICE_OP_ACTIVATION: activation(pass, op, SLUICE_T_ACT); return SLUICE_OK;
    case SLUICE_OP_GEMM2: return gemm2(pass, op);
    case SLUICE_OP_EXPERT: return sluice_host_expert(pass, op);
    case SLUICE_OP_REDUCE: reduce(pass, op); return SLUICE_OK;
    case SLUICE_OP_NODE_DISPATCH: return sluice_node_dispatch(pass, op, index, pass->in_rows);
    case SLUICE_OP_NODE_COMBINE: return sluice_node_combine(pass, op, index, SLUICE_T_DO);
    case SLUICE_OP_COPY_OUT: return sluice_copy(pass, op, index);
    default:
      return SLUICE_FAIL(SLUICE_E_INTERNAL, "forward: op %s is not an op of a forward", sluice_op_name(op->kind));
  }
}
