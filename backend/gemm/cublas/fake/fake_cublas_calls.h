// SPDX-License-Identifier: Apache-2.0
/* Calls of the fake cuBLAS and the fake cuBLASLt, counted together, and the one that a test has fail. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_CALLS_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_CALLS_H_

#include <stdint.h>

/* As the fake driver's. */
void sluice_fake_cublas_fail_call(int64_t nth, int code);
int sluice_fake_cublas_failed(void);

/* Counts a call; the code with which it is to fail, or 0. */
int sluice_fake_cublas_planned(void);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_CALLS_H_ */
