// SPDX-License-Identifier: Apache-2.0
/* A GEMM on the CPU, in the order of a stream of the fake CUDA driver. What it reads and writes is noted there. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_GEMMS_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_GEMMS_H_

#include "backend/device/cuda/fake/fake_cuda.h"

/* Column-major, as BLAS. Types are cuBLAS's. */
typedef struct fake_gemm_s {
  int trans_a, trans_b, m, n, k, lda, ldb, ldc, type, type_c;
  double alpha, beta;
  const void* a;
  const void* b;
  void* c;
  sluice_fake_moment_t moment;
} fake_gemm_t;

/* Of the driver's record: a call of the library with all its GEMMs. `entry` names it; takes the lock. */
void sluice_fake_gemm_record(void* stream, const char* entry, const fake_gemm_t* problems, int count);
/* Sizes that no GEMM has. */
int sluice_fake_gemm_is_wrong(const fake_gemm_t* problem);
/* Now, where the driver is not dry; its lock is held. */
void sluice_fake_gemm_run(const fake_gemm_t* problem);
void sluice_fake_gemm_poison(const fake_gemm_t* problem); /* C becomes NaN */
/* Later; both take the lock. */
void sluice_fake_gemm_enqueue(void* stream, const char* entry, const fake_gemm_t* problem);
void sluice_fake_op_enqueue(void* stream, const sluice_fake_op_t* op);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_GEMMS_H_ */
