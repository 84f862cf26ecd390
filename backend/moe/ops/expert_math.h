// SPDX-License-Identifier: Apache-2.0
/* GEMMs over the local experts, described by the host's parameter tensors. Private to moe. */
#pragma once

#include "backend/base/tensor.h"
#include "backend/moe/pass/pass.h"

/* [rows, width] rows of a slot, from column `column` of rows `row_width` wide. */
static inline sluice_matrix_t sluice_rows_matrix(void* rows, int64_t row_width, int64_t column, uint64_t element) {
  return (sluice_matrix_t){(char*)rows + (uint64_t)column * element, row_width, 1};
}
static inline sluice_matrix_t sluice_tensor_matrix(const sluice_tensor_t* t) {
  return (sluice_matrix_t){sluice_tensor_data(t), sluice_tensor_stride(t, 0), sluice_tensor_stride(t, 1)};
}
static inline sluice_matrix_t sluice_transpose(sluice_matrix_t m) {
  return (sluice_matrix_t){m.data, m.col_stride, m.row_stride};
}

/* Whether the rows of `lower` follow those of `upper` in memory, so that both are one matrix. */
int sluice_is_stacked(const sluice_tensor_t* upper, const sluice_tensor_t* lower, uint64_t element);

/* Whether W3's rows follow W1's, so that [W1; W3] is one [2H, M] matrix (the hosts' fused gate-up layout); for packed
 * weights also whether their scales do. */
int sluice_gate_up_is_fused(const sluice_pass_t* pass, int32_t local);

/* A local expert's weight, or its transpose, as B of pass->gemms[index]. For a packed weight, pass->packed[index] is
 * filled in. parameter: SLUICE_W1, _W3 or _W2. */
sluice_matrix_t sluice_weight(sluice_pass_t* pass, int64_t index, int32_t parameter, int32_t local, int transposed);

/* Runs the first `count` problems of pass->gemms on the stream of the op's lane. */
sluice_status_t sluice_grouped_gemm_run(sluice_pass_t* pass, const sluice_op_t* op, int64_t count, int32_t dtype_c,
                                        float beta);
