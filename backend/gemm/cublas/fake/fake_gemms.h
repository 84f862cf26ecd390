// SPDX-License-Identifier: Apache-2.0
/* GEMMs on the CPU, in the order of a stream of the fake CUDA driver, which records what they read and write. */
#pragma once

#include "backend/device/cuda/fake/fake_cuda.h"

/* Column-major, as in BLAS. Types are those of cuBLAS. */
typedef struct fake_gemm_s {
  int trans_a, trans_b, m, n, k, lda, ldb, ldc, type, type_c;
  double alpha, beta;
  const void* a;
  const void* b;
  void* c;
  sluice_fake_moment_t moment;
  int sms; /* the number that the library was told; 0: all */
} fake_gemm_t;

/* Adds a call of the library, named `entry`, with all its GEMMs to the driver's record. Takes the lock. */
void sluice_fake_gemm_record(void* stream, const char* entry, const fake_gemm_t* problems, int count);
/* Whether the sizes are invalid. */
int sluice_fake_gemm_is_wrong(const fake_gemm_t* problem);
/* Runs the GEMM now, unless the driver is dry. The caller holds the driver's lock. */
void sluice_fake_gemm_run(const fake_gemm_t* problem);
void sluice_fake_gemm_poison(const fake_gemm_t* problem); /* C becomes NaN */
/* Enqueue a GEMM, or any op; both take the lock. */
void sluice_fake_gemm_enqueue(void* stream, const char* entry, const fake_gemm_t* problem);
void sluice_fake_op_enqueue(void* stream, const sluice_fake_op_t* op);
