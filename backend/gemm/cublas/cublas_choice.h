/* Which call of the vendor's libraries a list of GEMMs goes through, by its shape. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_

#include "backend/gemm/gemm.h"

typedef enum sluice_cublas_how_e {
  SLUICE_CUBLAS_BY_TABLE = 0,
  SLUICE_CUBLAS_GROUPED, /* cublasGemmGroupedBatchedEx; one by one where it is not there or declines */
  SLUICE_CUBLAS_SINGLE,  /* cublasGemmEx, one by one */
  SLUICE_CUBLAS_LT       /* cublasLtMatmul, one by one; cublasGemmEx where it is not there or declines */
} sluice_cublas_how_t;

/* The choice for this list: the first row of the table (cublas_choices.inc) that holds, else grouped. Rows are measured
 * on a GPU by integration_tests/gpu (the item "choice" of gpu_suite prints them), never estimated; the choice depends
 * on the shape alone, so that bits repeat. */
int32_t sluice_cublas_choose(const sluice_grouped_gemm_t* list);
/* "grouped", "single", "lt"; SLUICE_CUBLAS_BY_TABLE for any other text, and for NULL. */
int32_t sluice_cublas_how_named(const char* name);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_CUBLAS_CHOICE_H_ */
