/* What the fake cuBLAS and the fake cuBLASLt share. Internal to this folder. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_PARTS_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_PARTS_H_

#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"

/* Column-major, as BLAS. */
typedef struct fake_product_s {
  int trans_a, trans_b, m, n, k, lda, ldb, ldc, type, type_c;
  double alpha, beta;
  const void* a;
  const void* b;
  void* c;
  sluice_fake_moment_t moment;
} fake_product_t;

/* Counts a call; the code with which it is to fail, or 0. */
int sluice_fake_cublas_planned(void);
int sluice_fake_cublas_is_wrong(const fake_product_t* product);
void sluice_fake_cublas_enqueue(void* stream, const fake_product_t* product);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_PARTS_H_ */
