// SPDX-License-Identifier: Apache-2.0
/* Which call of the vendor's libraries a list of GEMMs goes through, by its shape. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_

#include "backend/gemm/gemm.h"

typedef enum sluice_cublas_how_e {
  SLUICE_CUBLAS_BY_RULE = 0,
  SLUICE_CUBLAS_GROUPED, /* cublasGemmGroupedBatchedEx; one by one where it is not there or declines */
  SLUICE_CUBLAS_SINGLE,  /* cublasGemmEx, one by one */
  SLUICE_CUBLAS_LT,      /* cublasLtMatmul, one by one; cublasGemmEx where it is not there or declines */
  SLUICE_CUBLAS_STREAMS  /* cublasGemmEx on four streams side by side */
} sluice_cublas_how_t;

/* The choice for this list on a device of so many SMs: one by one, or on streams side by side where single GEMMs would
 * leave SMs idle for longer than joining streams takes. A GEMM of two waves of tiles or more fills the device; a
 * smaller one leaves those SMs that have no tile of its last wave, for the time of a tile, which goes by k. The choice
 * depends on the shape alone, so that bits repeat. The item "choice" of gpu_suite compares it with measured times. */
int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list, int32_t num_sms);
/* "grouped", "single", "lt", "streams"; SLUICE_CUBLAS_BY_RULE for any other text, and for NULL. */
int32_t sluice_cublas_how_named(const char* name);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_ */
