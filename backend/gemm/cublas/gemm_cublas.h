// SPDX-License-Identifier: Apache-2.0
/* GEMMs with cuBLAS, which is opened at run time through one table of symbols.
 *
 * A list runs as one call per GEMM, on the list's stream, or side by side on that stream and three of our own, which
 * events join; in a capture too. Side by side, cuBLAS is told of as many SMs as a GEMM's large tiles fill evenly. f32
 * accumulation (f64 for f64); reduced-precision reductions are forbidden; TF32 only by choice. The workspace is ours,
 * so that cuBLAS allocates nothing while a graph is captured; streams side by side have a quarter of it each. Which way
 * a list goes is chosen by its shape (cublas_choice.h), or by the environment variable SLUICE_CUBLAS (grouped, single,
 * lt, streams), read at create: grouped calls and cuBLASLt (cublaslt.h) run by that alone. Hand-written Hopper kernels
 * are not there.
 *
 * SLUICE_CUBLAS_SMS, read at create, leaves SMs to other streams: GEMMs have that many. cuBLASLt knows nothing of it.
 *
 * Between runs of one library version on one GPU the bits repeat: a GEMM's bits go by its shape, the bytes of its
 * workspace and the SMs that cuBLAS is told of, not by its stream. */
#ifndef SLUICE_BACKEND_GEMM_CUBLAS_GEMM_CUBLAS_H_
#define SLUICE_BACKEND_GEMM_CUBLAS_GEMM_CUBLAS_H_

#include "backend/device/device.h"
#include "backend/gemm/cublas/cublas_choice.h"
#include "backend/gemm/cublas/cublas_symbols.h"
#include "backend/gemm/cublas/cublaslt.h"
#include "backend/gemm/gemm.h"

#define SLUICE_CUBLAS_MIN_VERSION 120000 /* 12.0.0 */

typedef struct sluice_gemm_cublas_options_s {
  sluice_device_t* device;                /* a CUDA device; borrowed until destroy */
  sluice_allocator_t* memory;             /* of device memory, for the workspace; borrowed until destroy */
  const char* library;                    /* path; NULL: libcublas.so.13, then .12; a loaded one is preferred */
  const sluice_cublas_symbols_t* symbols; /* instead of a library; copied */
  /* Of cuBLASLt; copied. With `symbols` but without lt_symbols, cuBLASLt counts as missing, which is no error. */
  const sluice_cublaslt_symbols_t* lt_symbols;
  int32_t how;              /* SLUICE_CUBLAS_*; BY_RULE: the environment variable, else the rule */
  uint64_t workspace_bytes; /* 0: 32 MiB, what cuBLAS recommends for Hopper */
  int32_t tf32;             /* 1: f32 GEMMs may round their operands to TF32 */
} sluice_gemm_cublas_options_t;

/* out_gemm: new, sluice_gemm_destroy. Its run() enqueues on list->stream and returns; operands are device memory.
 * Errors: NOT_FOUND (no library, a symbol missing, version below 12.0), INVALID_ARGUMENT
 * (SLUICE_CUBLAS_SMS), NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_gemm_cublas_create(const sluice_gemm_cublas_options_t* options, sluice_allocator_t* allocator,
                                          sluice_gemm_t** out_gemm);

#endif /* SLUICE_BACKEND_GEMM_CUBLAS_GEMM_CUBLAS_H_ */
