// SPDX-License-Identifier: Apache-2.0
/* Chooses the function of cuBLAS or cuBLASLt for a list of GEMMs, by its shape. */
#pragma once

#include "backend/gemm/gemm.h"

typedef enum sluice_cublas_how_e {
  SLUICE_CUBLAS_BY_RULE = 0,
  SLUICE_CUBLAS_GROUPED, /* cublasGemmGroupedBatchedEx; cublasGemmEx, one by one, if the library lacks it or declines */
  SLUICE_CUBLAS_SINGLE,  /* cublasGemmEx, one by one */
  SLUICE_CUBLAS_LT,      /* cublasLtMatmul, one by one; cublasGemmEx if cuBLASLt is missing or declines */
  SLUICE_CUBLAS_STREAMS  /* cublasGemmEx on four concurrent streams */
} sluice_cublas_how_t;

/* Chooses how a list runs on a device with num_sms SMs: one GEMM after the other, or on concurrent streams if the
 * estimate from tiles, waves and k is 5 % faster. It depends only on the shapes, so that bits repeat. The item "choice"
 * of gpu_suite compares the estimate with measured times. */
int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list, int32_t num_sms);
/* The number of SMs that cuBLAS is told for a GEMM on concurrent streams: as many as the large tiles fill evenly in
 * each wave, but at least a stream's share. If cuBLAS were told all SMs, it would choose small tiles for a GEMM that
 * does not fill them: that GEMM would end sooner, but the list later. The other GEMMs run on the remaining SMs. */
int32_t sluice_cublas_sms_of(int64_t m, int64_t n, int32_t num_sms);
/* "grouped", "single", "lt", "streams"; SLUICE_CUBLAS_BY_RULE for any other text, and for NULL. */
int32_t sluice_cublas_how_named(const char* name);
