// SPDX-License-Identifier: Apache-2.0
/* A fake cuBLAS for tests, which multiplies on the CPU, in stream order on the queues of the fake CUDA driver. */
#pragma once

#include "backend/gemm/cublas/gemm_cublas.h"

/* with_groups: 0: a library without cublasGemmGroupedBatchedEx; 1: with it, for all types; 2 to 4: with it, but bf16
 * and f16 are declined as not supported (2), not supported on this architecture (3), or invalid (4). Grouped GEMMs of
 * 16-bit types or TF32 return NaN if a pointer is not aligned to 16. */
sluice_cublas_symbols_t sluice_fake_cublas(int with_groups);
/* As sluice_fake_cuda_fail_call and sluice_fake_cuda_failed, for calls of cuBLAS and cuBLASLt together. */
void sluice_fake_cublas_fail_call(int64_t nth, int code);
int sluice_fake_cublas_failed(void);
/* Counts a call; returns the code with which it must fail, or 0. */
int sluice_fake_cublas_planned(void);
void sluice_fake_cublas_set_version(int version);
int64_t sluice_fake_cublas_handles(void);
int64_t sluice_fake_cublas_single_calls(void);
int64_t sluice_fake_cublas_grouped_calls(void);
/* The compute type of the last GEMM, and the number of SMs that the library was told for it (0: all). */
int sluice_fake_cublas_last_compute(void);
int sluice_fake_cublas_last_sms(void);

/* A fake cuBLASLt. Its calls count together with those above. By default it has version 130002 and declines nothing. */
sluice_cublaslt_symbols_t sluice_fake_cublaslt(void);
void sluice_fake_cublaslt_set(size_t version, int declines);
int64_t sluice_fake_cublaslt_live(void); /* handles, descriptors, layouts, preferences */
int64_t sluice_fake_cublaslt_gemms(void);
int64_t sluice_fake_cublaslt_searches(void);
void sluice_fake_cublaslt_set_most_columns(int most); /* that a checked algorithm supports; 0: any number */
