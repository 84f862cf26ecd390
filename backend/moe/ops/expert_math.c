#include "backend/moe/ops/expert_math.h"

int sluice_is_stacked(const sluice_tensor_t* upper, const sluice_tensor_t* lower, uint64_t element) {
  const int64_t stride = sluice_tensor_stride(upper, 0);
  if (stride != sluice_tensor_stride(lower, 0)) return 0;
  if (sluice_tensor_stride(upper, 1) != sluice_tensor_stride(lower, 1)) return 0;
  return (char*)sluice_tensor_data(lower) - (char*)sluice_tensor_data(upper) ==
         (int64_t)element * upper->shape[0] * stride;
}

int sluice_gate_up_is_fused(const sluice_expert_tensors_t* params, int32_t local, uint64_t element) {
  if (params->w3 == NULL) return 1; /* one matrix already, its rows in turn */
  return sluice_is_stacked(&params->w1[local], &params->w3[local], element);
}

sluice_status_t sluice_grouped_gemm_run(sluice_pass_t* pass, const sluice_op_t* op, int64_t count, int32_t dtype_c,
                                        float beta) {
  if (count == 0) return SLUICE_OK;
  const sluice_grouped_gemm_t list = {pass->gemms, count, pass->moe->shape.config.dtype,
                                      dtype_c,     beta,  sluice_pass_stream(pass, op)};
  return sluice_gemm_run(pass->context->gemm, &list);
}
