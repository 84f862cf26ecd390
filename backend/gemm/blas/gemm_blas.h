// SPDX-License-Identifier: Apache-2.0
/* A BLAS reached by one table of symbols, which tests may fill themselves. */
#ifndef SLUICE_BACKEND_GEMM_BLAS_GEMM_BLAS_H_
#define SLUICE_BACKEND_GEMM_BLAS_GEMM_BLAS_H_

#include <stddef.h>

#include "backend/gemm/gemm.h"

typedef struct sluice_blas_symbols_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(required, result, name, parameters) result(*name) parameters;
#include "backend/gemm/blas/blas_symbols.inc"
#undef SYMBOL
} sluice_blas_symbols_t;

/* As sluice_gemm_blas_create, but NOT_FOUND is not recorded: its text goes to `why`, for a caller with alternatives. */
sluice_status_t sluice_gemm_blas_open(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm,
                                      char* why, size_t why_bytes);
/* From a filled table; `label` is what the name shows in parentheses. */
sluice_status_t sluice_gemm_blas_create_from(const sluice_blas_symbols_t* symbols, const char* label,
                                             sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);

#endif /* SLUICE_BACKEND_GEMM_BLAS_GEMM_BLAS_H_ */
