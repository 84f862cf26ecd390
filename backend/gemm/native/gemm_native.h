// SPDX-License-Identifier: Apache-2.0
/* "native": Sluice's own GEMMs for processors with AMX, AVX-512 or AVX2, made for few rows per expert. By default it
 * uses the widest set of kernels that the processor can run. The environment variable SLUICE_NATIVE ("amx",
 * "avx512_bf16", "avx512" or "avx2") replaces this choice; any other name, or a set that the processor cannot run, is
 * an error. Only the bits of bf16 depend on the set: "amx" and "avx512_bf16" each have their own. */
#pragma once

#include <stddef.h>

#include "backend/base/threads.h"
#include "backend/gemm/gemm.h"

/* As sluice_gemm_native_create, but writes the text of NOT_FOUND to `why` and does not record that error.
 * Errors: NOT_FOUND, NO_MEMORY; INVALID_ARGUMENT or UNSUPPORTED if SLUICE_NATIVE is not valid. */
sluice_status_t sluice_gemm_native_open(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm, char* why,
                                        size_t why_bytes);
/* The same with these threads, for tests. */
sluice_status_t sluice_gemm_native_create_with(const sluice_threads_t* pool, sluice_allocator_t* allocator,
                                               sluice_gemm_t** out_gemm, char* why, size_t why_bytes);
