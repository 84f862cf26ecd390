// SPDX-License-Identifier: Apache-2.0
/* Counts the calls of the fake cuBLAS and the fake cuBLASLt together, and lets the call that a test chooses fail. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_CALLS_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_CALLS_H_

#include <stdint.h>

/* As sluice_fake_cuda_fail_call and sluice_fake_cuda_failed. */
void sluice_fake_cublas_fail_call(int64_t nth, int code);
int sluice_fake_cublas_failed(void);

/* Counts a call; returns the code with which it must fail, or 0. */
int sluice_fake_cublas_planned(void);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_FAKE_FAKE_CUBLAS_CALLS_H_ */
