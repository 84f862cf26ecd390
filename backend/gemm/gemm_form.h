// SPDX-License-Identifier: Apache-2.0
/* Converts GEMMs to the form of BLAS-like libraries: row-major matrices with a leading dimension, A and B optionally
 * transposed. Internal to backend/gemm. */
#pragma once

#include <string.h>

#include "backend/base/dtype.h"
#include "backend/gemm/gemm.h"

/* C [m, n] is row-major with `ldc`. A is stored [m, k] or, with trans_a, [k, m]; B [k, n] or, with trans_b, [n, k]. */
typedef struct sluice_gemm_form_s {
  int64_t m, n, k;
  const void* a;
  const void* b;
  void* c;
  int64_t lda, ldb, ldc;
  int trans_a, trans_b;
  sluice_packed_t packed; /* of B; if B is packed, ldb counts codes and trans_b is packed.transposed */
} sluice_gemm_form_t;

/* Returns the leading dimension of [rows, cols] stored row by row, or 0 if the strides do not allow it. Ignores the row
 * stride of a single row, the column stride of a single column, and the strides of a matrix without columns. */
static inline int64_t sluice_gemm_leading(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  int64_t width = cols > 1 ? cols : 1;
  if (cols > 1 && col_stride != 1) return 0;
  if (rows <= 1 || cols == 0) return width;
  return row_stride >= width ? row_stride : 0;
}

static inline int sluice_gemm_side(int64_t rows, int64_t cols, const sluice_matrix_t* matrix, int64_t* out_ld,
                                   int* out_trans) {
  *out_trans = 0;
  *out_ld = sluice_gemm_leading(rows, cols, matrix->row_stride, matrix->col_stride);
  if (*out_ld != 0) return 1;
  *out_trans = 1;
  *out_ld = sluice_gemm_leading(cols, rows, matrix->col_stride, matrix->row_stride);
  return *out_ld != 0;
}

/* Returns 1 and the form, or 0 if the strides have none. A column-major C is computed as C^T = B^T A^T. */
static inline int sluice_gemm_form(const sluice_gemm_problem_t* problem, sluice_gemm_form_t* out) {
  sluice_gemm_problem_t p = *problem;
  int trans_c;
  if (!sluice_gemm_side(p.m, p.n, &p.c, &out->ldc, &trans_c)) return 0;
  out->packed = (sluice_packed_t){0};
  if (trans_c) {
    const sluice_matrix_t a = p.a;
    p.a = (sluice_matrix_t){p.b.data, p.b.col_stride, p.b.row_stride};
    p.b = (sluice_matrix_t){a.data, a.col_stride, a.row_stride};
    p.m = problem->n;
    p.n = problem->m;
  }
  out->m = p.m;
  out->n = p.n;
  out->k = p.k;
  out->a = p.a.data;
  out->b = p.b.data;
  out->c = p.c.data;
  return sluice_gemm_side(p.m, p.k, &p.a, &out->lda, &out->trans_a) &&
         sluice_gemm_side(p.k, p.n, &p.b, &out->ldb, &out->trans_b);
}

/* The same for GEMM `index` of a list; its B may be packed. */
static inline int sluice_gemm_form_of(const sluice_grouped_gemm_t* list, int64_t index, sluice_gemm_form_t* out) {
  const sluice_gemm_problem_t* p = &list->problems[index];
  if (!sluice_gemm_is_packed(list, index)) return sluice_gemm_form(p, out);
  *out = (sluice_gemm_form_t){.m = p->m, .n = p->n, .k = p->k, .a = p->a.data, .b = p->b.data, .c = p->c.data};
  out->packed = list->packed[index];
  out->trans_b = out->packed.transposed;
  out->lda = sluice_gemm_leading(p->m, p->k, p->a.row_stride, p->a.col_stride);
  out->ldb = out->trans_b ? sluice_gemm_leading(p->n, p->k, p->b.col_stride, p->b.row_stride)
                          : sluice_gemm_leading(p->k, p->n, p->b.row_stride, p->b.col_stride);
  out->ldc = sluice_gemm_leading(p->m, p->n, p->c.row_stride, p->c.col_stride);
  return out->lda != 0 && out->ldb != 0 && out->ldc != 0;
}

/* Returns 1 if the library has nothing to compute: C is empty, or k = 0. For k = 0 it computes C = beta * C. */
static inline int sluice_gemm_form_is_trivial(const sluice_gemm_form_t* form, int32_t dtype_c, float beta) {
  if (form->m == 0 || form->n == 0) return 1;
  if (form->k != 0) return 0;
  uint64_t bytes = sluice_dtype_bytes(dtype_c);
  for (int64_t i = 0; beta == 0.0f && i < form->m; ++i) {
    memset((char*)form->c + (uint64_t)(i * form->ldc) * bytes, 0, (uint64_t)form->n * bytes);
  }
  return 1;
}
