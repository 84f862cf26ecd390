// SPDX-License-Identifier: Apache-2.0
/* GEMMs through a BLAS, which is called through one table of symbols. Tests may fill the table. */
#pragma once

#include <stddef.h>

#include "backend/gemm/gemm.h"

typedef struct sluice_blas_symbols_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(required, result, name, parameters) result(*name) parameters;
#include "backend/gemm/blas/blas_symbols.inc"
#undef SYMBOL
} sluice_blas_symbols_t;

/* As sluice_gemm_blas_create, but writes the text of NOT_FOUND to `why` and does not record that error. */
sluice_status_t sluice_gemm_blas_open(const char* library, sluice_allocator_t* allocator, sluice_gemm_t** out_gemm,
                                      char* why, size_t why_bytes);
/* Creates the gemm from a filled table. The name shows `label` in parentheses. */
sluice_status_t sluice_gemm_blas_create_from(const sluice_blas_symbols_t* symbols, const char* label,
                                             sluice_allocator_t* allocator, sluice_gemm_t** out_gemm);
