#include "backend/moe/ops/expert_math.h"

int sluice_gate_up_is_fused(const sluice_expert_tensors_t* params, int32_t local, int64_t hidden, uint64_t element) {
  if (params->w3 == NULL) return 1; /* one matrix already, its rows in turn */
  const sluice_tensor_t* w1 = &params->w1[local];
  const sluice_tensor_t* w3 = &params->w3[local];
  if (sluice_tensor_stride(w1, 0) != sluice_tensor_stride(w3, 0)) return 0;
  if (sluice_tensor_stride(w1, 1) != sluice_tensor_stride(w3, 1)) return 0;
  return (char*)sluice_tensor_data(w3) - (char*)sluice_tensor_data(w1) ==
         (int64_t)element * hidden * sluice_tensor_stride(w1, 0);
}

sluice_status_t sluice_grouped_gemm_run(sluice_pass_t* pass, const sluice_op_t* op, int64_t count, int32_t dtype_c,
                                        float beta) {
  if (count == 0) return SLUICE_OK;
  const sluice_grouped_gemm_t list = {pass->gemms, count, pass->moe->shape.config.dtype,
                                      dtype_c,     beta,  sluice_pass_stream(pass, op)};
  return sluice_gemm_run(pass->context->gemm, &list);
}
