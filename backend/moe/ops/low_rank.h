// SPDX-License-Identifier: Apache-2.0
/* The low-rank terms of an expert's GEMMs (adapters, LoRA). W + s B A is never formed: with X the rows that W
 * multiplies, Y = X W^T and G the gradient of Y,
 *   Y  += P B^T with P = s X A^T          X's gradient += U A with U = s G B
 *   dB  = G^T P                            dA = U^T X
 * P and U lie in T_LOW. P is computed again when needed, and U if a linear layer has two terms. A term is written
 * before the large GEMM, which then adds to it: the additional rounding affects only the small addend. Private to moe.
 */
#pragma once

#include "backend/moe/ops/expert_math.h"

/* One pair of factors, by local expert, and the columns of Y that it adds to. */
typedef struct sluice_low_term_s {
  const sluice_tensor_t* a;       /* [r, width of X] */
  const sluice_tensor_t* b;       /* [columns, r], or the upper half of it */
  const sluice_tensor_t* b_lower; /* the lower half, of a second matrix that shares a; NULL: b is whole */
  int32_t parameter;              /* SLUICE_LA1, _LA3 or _LA2; the parameter of b follows it */
  int64_t first, columns;         /* of Y */
  float scale;
} sluice_low_term_t;

/* Which of an expert's two linear layers: [W1; W3], or W2. */
typedef enum sluice_linear_e { SLUICE_LINEAR_UP = 0, SLUICE_LINEAR_DOWN } sluice_linear_t;

#define SLUICE_MAX_LOW_TERMS 2 /* of one linear layer: gate and up */

/* The terms of a linear layer in this call, at most SLUICE_MAX_LOW_TERMS; returns how many. */
int32_t sluice_low_terms(const sluice_pass_t* pass, sluice_linear_t linear, sluice_low_term_t* out_terms);

/* Computes Y = s (X A^T) B^T of the op's chunk, in all columns of Y: x, y are T_DI and T_M, or T_ACT and T_DO.
 * out_beta: the factor of Y in the GEMM with W; 0 if there are no terms, and nothing was written. */
sluice_status_t sluice_low_forward(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear, float* out_beta);
/* The same for the gradient of X: (s G B) A. */
sluice_status_t sluice_low_backward(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear,
                                    float* out_beta);

/* Computes P of a term for the gradient of B, in the first half of T_LOW's rows, of the op's chunk or all chunks. */
sluice_status_t sluice_low_p(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear,
                             const sluice_low_term_t* term);
/* Computes U of a term for the gradient of A. *out_half: the half of T_LOW's rows that has U. If sluice_low_backward
 * has left it there, nothing is computed. Must be called before sluice_low_p, which overwrites U of [W1; W3]. */
sluice_status_t sluice_low_u(sluice_pass_t* pass, const sluice_op_t* op, sluice_linear_t linear,
                             const sluice_low_term_t* term, int32_t* out_half);
/* Columns of a half of T_LOW at `rows`, an address in T_LOW. */
sluice_matrix_t sluice_low_matrix(const sluice_pass_t* pass, void* rows, int32_t second);

/* Hash of what a forward and its backward must share: which adapters there are, their ranks and scales; 0: none. */
uint64_t sluice_low_signature(const sluice_expert_tensors_t* params);
