// SPDX-License-Identifier: Apache-2.0
/* Counts the calls of the fake cuBLAS and the fake cuBLASLt together, and lets the call that a test chooses fail. */
#pragma once

#include <stdint.h>

/* As sluice_fake_cuda_fail_call and sluice_fake_cuda_failed. */
void sluice_fake_cublas_fail_call(int64_t nth, int code);
int sluice_fake_cublas_failed(void);

/* Counts a call; returns the code with which it must fail, or 0. */
int sluice_fake_cublas_planned(void);
