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

/* Returns the choice for this list on a device with num_sms SMs: one by one, or concurrent streams if single GEMMs
 * would leave SMs idle for longer than joining streams takes. A GEMM with two or more waves of tiles fills the device.
 * A smaller one leaves the SMs without a tile in its last wave idle for the time of a tile, which is proportional to k.
 * The choice depends on the shape alone, so that bits repeat. Item "choice" of gpu_suite compares it with measured
 * times. */
int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list, int32_t num_sms);
/* Parses "grouped", "single", "lt" or "streams"; returns SLUICE_CUBLAS_BY_RULE for any other text, and for NULL. */
int32_t sluice_cublas_how_named(const char* name);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_ */
