// SPDX-License-Identifier: Apache-2.0
/* The functions of cuBLAS that Sluice calls, as a table, and their constants. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct sluice_cublas_symbols_s {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declarator */
#define SYMBOL(required, name, parameters) int(*name) parameters;
#include "backend/gemm/cublas/cublas_symbols.inc"
#undef SYMBOL
} sluice_cublas_symbols_t;

/* Values of cublas_api.h and library_types.h; `./test --vendor` compares them. */
enum {
  SLUICE_CUBLAS_ALLOC_FAILED = 3,
  SLUICE_CUBLAS_INVALID_VALUE = 7,
  SLUICE_CUBLAS_ARCH_MISMATCH = 8,
  SLUICE_CUBLAS_NOT_SUPPORTED = 15,
  SLUICE_CUBLAS_OP_N = 0,
  SLUICE_CUBLAS_OP_T = 1,
  SLUICE_CUBLAS_R_32F = 0,
  SLUICE_CUBLAS_R_64F = 1,
  SLUICE_CUBLAS_R_16F = 2,
  SLUICE_CUBLAS_R_16BF = 14,
  SLUICE_CUBLAS_COMPUTE_32F = 68,
  SLUICE_CUBLAS_COMPUTE_TF32 = 77,
  SLUICE_CUBLAS_COMPUTE_64F = 70,
  SLUICE_CUBLAS_MATH_FULL_REDUCTION = 16,
  SLUICE_CUBLAS_ALGORITHM_DEFAULT = -1
};
