// SPDX-License-Identifier: Apache-2.0
/* Single GEMMs with cuBLASLt, which is opened at run time through one table of symbols. The heuristics of cuBLASLt
 * choose an algorithm by sizes, strides and alignment, which is cached. Up to 128 rows of an expert are rounded up to a
 * multiple of 16, more rows to a multiple of 128, and cuBLASLt checks the algorithm for the exact number. Internal to
 * gemm/cublas, which uses it for SLUICE_CUBLAS_LT (cublas_choice.h). Without the library, all GEMMs go through cuBLAS.
 */
#pragma once

#include <stddef.h>

#include "backend/base/alloc.h"
#include "backend/device/device.h"

/* cublasLtMatmulHeuristicResult_t */
typedef struct sluice_cublaslt_result_s {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
} sluice_cublaslt_result_t;

typedef struct sluice_cublaslt_symbols_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(result, name, parameters) result(*name) parameters;
#include "backend/gemm/cublas/cublaslt_symbols.inc"
#undef SYMBOL
} sluice_cublaslt_symbols_t;

/* Values of cublasLt.h; `./test --vendor` compares them. */
enum {
  SLUICE_CUBLASLT_DESC_TRANS_A = 3,
  SLUICE_CUBLASLT_DESC_TRANS_B = 4,
  SLUICE_CUBLASLT_LAYOUT_COLUMNS = 3,
  SLUICE_CUBLASLT_PREF_MAX_WORKSPACE = 1,
  SLUICE_CUBLASLT_PREF_REDUCTIONS = 3,
  SLUICE_CUBLASLT_PREF_ALIGNMENT_A = 5,
  SLUICE_CUBLASLT_PREF_ALIGNMENT_B = 6,
  SLUICE_CUBLASLT_PREF_ALIGNMENT_C = 7,
  SLUICE_CUBLASLT_PREF_ALIGNMENT_D = 8,
  SLUICE_CUBLASLT_REDUCTION_INPLACE = 1,
  SLUICE_CUBLASLT_REDUCTION_COMPUTE_TYPE = 2
};
#define SLUICE_CUBLASLT_MIN_VERSION 120000 /* 12.0.0 */

/* Column-major, as in BLAS: C [m, n] = op(A) op(B) + beta C. */
typedef struct sluice_cublaslt_call_s {
  int trans_a, trans_b, type, type_c, compute, scale_type;
  int64_t m, n, k, lda, ldb, ldc;
  const void* a;
  const void* b;
  void* c;
  const void* alpha; /* host, of scale_type */
  const void* beta;
  void* workspace; /* device */
  uint64_t workspace_bytes;
  sluice_stream_t stream;
} sluice_cublaslt_call_t;

typedef struct sluice_cublaslt_s sluice_cublaslt_t;

/* symbols NULL: libcublasLt.so.13, then .12; a loaded one is preferred. The device's context must be current.
 * out_lt: new, sluice_cublaslt_close. Errors: NOT_FOUND (no library or symbol, version < 12.0), NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_cublaslt_open(const sluice_cublaslt_symbols_t* symbols, sluice_allocator_t* allocator,
                                     sluice_cublaslt_t** out_lt);
void sluice_cublaslt_close(sluice_cublaslt_t* lt); /* accepts NULL */
/* Enqueues one GEMM. *out_declined: the library has no algorithm for it, and nothing was done. */
sluice_status_t sluice_cublaslt_run(sluice_cublaslt_t* lt, const sluice_cublaslt_call_t* call, int* out_declined);
