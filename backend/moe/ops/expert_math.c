// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/ops/expert_math.h"

#include <string.h>

#include "backend/base/dtype.h"

int sluice_is_stacked(const sluice_tensor_t* upper, const sluice_tensor_t* lower, uint64_t element) {
  const int64_t stride = sluice_tensor_stride(upper, 0);
  if (stride != sluice_tensor_stride(lower, 0)) return 0;
  if (sluice_tensor_stride(upper, 1) != sluice_tensor_stride(lower, 1)) return 0;
  return (char*)sluice_tensor_data(lower) - (char*)sluice_tensor_data(upper) ==
         (int64_t)element * upper->shape[0] * stride;
}

static const sluice_tensor_t* tensor_of(const sluice_expert_tensors_t* params, int32_t parameter) {
  return parameter == SLUICE_W1 ? params->w1 : parameter == SLUICE_W3 ? params->w3 : params->w2;
}

static const sluice_tensor_t* scales_of(const sluice_expert_tensors_t* params, int32_t parameter) {
  return parameter == SLUICE_W1 ? params->s1 : parameter == SLUICE_W3 ? params->s3 : params->s2;
}

int sluice_gate_up_is_fused(const sluice_pass_t* pass, int32_t local) {
  const sluice_expert_tensors_t* params = pass->params;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  if (params->w3 == NULL) return 1; /* one matrix already, with interleaved rows */
  const sluice_packed_format_t* format = sluice_packed_format(c->weight_format);
  const uint64_t element = format != NULL ? 1 : sluice_dtype_bytes(c->dtype);
  if (!sluice_is_stacked(&params->w1[local], &params->w3[local], element)) return 0;
  if (format == NULL) return 1;
  return sluice_is_stacked(&params->s1[local], &params->s3[local], (uint64_t)format->scale_bytes);
}

sluice_matrix_t sluice_weight(sluice_pass_t* pass, int64_t index, int32_t parameter, int32_t local, int transposed) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_tensor_t* tensor = &tensor_of(pass->params, parameter)[local];
  sluice_matrix_t w = sluice_tensor_matrix(tensor);
  const sluice_packed_format_t* format = sluice_packed_format(c->weight_format);
  if (format != NULL) {
    const sluice_tensor_t* scales = &scales_of(pass->params, parameter)[local];
    w.row_stride *= 8 / format->bits; /* strides count codes, not bytes */
    pass->packed[index] =
        (sluice_packed_t){.format = c->weight_format,
                          .block_cols = c->weight_block,
                          .transposed = transposed,
                          .scales = sluice_tensor_data(scales),
                          .scales_ld = sluice_tensor_stride(scales, 0),
                          .half = c->gated == SLUICE_GATED_HALVES && parameter == SLUICE_W1 ? c->hidden_width : 0};
  }
  return transposed ? sluice_transpose(w) : w;
}

sluice_status_t sluice_grouped_gemm_run(sluice_pass_t* pass, const sluice_op_t* op, int64_t count, int32_t dtype_c,
                                        float beta) {
  if (count == 0) return SLUICE_OK;
  sluice_grouped_gemm_t list = {pass->gemms, count, pass->moe->shape.config.dtype,
                                dtype_c,     beta,  sluice_pass_stream(pass, op)};
  for (int64_t i = 0; pass->packed != NULL && i < count; ++i) {
    if (pass->packed[i].format != SLUICE_PACKED_NO) list.packed = pass->packed;
  }
  list.scratch = pass->decoded, list.scratch_bytes = pass->decoded_bytes;
  const sluice_status_t status = sluice_gemm_run(pass->context->gemm, &list);
  if (list.packed != NULL) memset(pass->packed, 0, (size_t)count * sizeof *pass->packed);
  return status;
}
