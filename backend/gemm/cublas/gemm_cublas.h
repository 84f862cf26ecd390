// SPDX-License-Identifier: Apache-2.0
/* GEMMs with cuBLAS, which is opened at run time through one table of symbols.
 *
 * A list runs as one call per GEMM, either on the list's stream, or concurrently on that stream and three of our own,
 * which events join, also in a capture. For concurrent GEMMs, cuBLAS is told the number of SMs that large tiles fill
 * evenly. Accumulation is in f32 (f64 for f64); reduced-precision reductions are forbidden; TF32 is an option. The
 * workspace is ours, so that cuBLAS allocates nothing while a graph is captured; each concurrent stream has a quarter
 * of it. The shapes of a list decide how it runs (cublas_choice.h), unless `how` or the environment variable
 * SLUICE_CUBLAS (grouped, single, lt, streams), read at create, does: only these select grouped calls and cuBLASLt
 * (cublaslt.h). There are no hand-written Hopper kernels.
 *
 * SLUICE_CUBLAS_SMS, read at create, limits the SMs of GEMMs, to leave SMs to other streams. cuBLASLt ignores it.
 *
 * With one library version on one GPU the bits repeat from run to run: they depend on a GEMM's shape, the size of its
 * workspace and the number of SMs that cuBLAS is told, not on the stream. */
#pragma once

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
