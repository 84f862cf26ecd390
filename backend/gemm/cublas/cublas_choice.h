// SPDX-License-Identifier: Apache-2.0
/* Chooses the function of cuBLAS or cuBLASLt for a list of GEMMs, by its shape. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_

#include "backend/gemm/gemm.h"

typedef enum sluice_cublas_how_e {
  SLUICE_CUBLAS_BY_RULE = 0,
  SLUICE_CUBLAS_GROUPED, /* cublasGemmGroupedBatchedEx; cublasGemmEx, one by one, if the library lacks it or declines */
  SLUICE_CUBLAS_SINGLE,  /* cublasGemmEx, one by one */
  SLUICE_CUBLAS_LT,      /* cublasLtMatmul, one by one; cublasGemmEx if cuBLASLt is missing or declines */
  SLUICE_CUBLAS_STREAMS  /* cublasGemmEx on four concurrent streams */
} sluice_cublas_how_t;

/* The choice for this list on a device of so many SMs: one by one, or on streams side by side where that seems faster
 * by a twentieth. It is estimated from tiles, waves and k, and depends on the shape alone, so that bits repeat. The
 * item "choice" of gpu_suite compares it with measured times. */
int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list, int32_t num_sms);
/* How many SMs cuBLAS is told that a GEMM has on streams side by side: as many as have a large tile in each of its
 * waves, but at least a stream's share. Told of all SMs, it would take small tiles for a GEMM that does not fill them,
 * with which that GEMM alone ends sooner, and all GEMMs together later. SMs that are left run the other GEMMs. */
int32_t sluice_cublas_sms_of(int64_t m, int64_t n, int32_t num_sms);
/* "grouped", "single", "lt", "streams"; SLUICE_CUBLAS_BY_RULE for any other text, and for NULL. */
int32_t sluice_cublas_how_named(const char* name);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_ */
