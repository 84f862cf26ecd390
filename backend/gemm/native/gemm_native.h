// SPDX-License-Identifier: Apache-2.0
/* "native": Sluice's own GEMMs for processors with AMX, AVX-512 or AVX2, made for few rows per expert. The
 * environment variable SLUICE_NATIVE, "amx", "avx512" or "avx2", replaces the choice of kernels, which is the widest
 * that the processor has; bits depend on it only in bf16, where those of "amx" are its own. A word that is no such
 * name, or names what the processor lacks, is an error. */
#ifndef SLUICE_BACKEND_GEMM_NATIVE_GEMM_NATIVE_H_
#define SLUICE_BACKEND_GEMM_NATIVE_GEMM_NATIVE_H_

#include <stddef.h>

#include "backend/base/threads.h"
#include "backend/gemm/gemm.h"

/* As sluice_gemm_native_create, but NOT_FOUND is not recorded: its text goes to `why`, for a caller with alternatives.
 * Errors: NOT_FOUND, NO_MEMORY; INVALID_ARGUMENT, UNSUPPORTED: SLUICE_NATIVE. */
sluice_status_t sluice_gemm_native_open(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm, char* why,
                                        size_t why_bytes);
/* With these threads, for tests. */
sluice_status_t sluice_gemm_native_create_with(const sluice_threads_t* pool, sluice_allocator_t* allocator,
                                               sluice_gemm_t** out_gemm, char* why, size_t why_bytes);

#endif /* SLUICE_BACKEND_GEMM_NATIVE_GEMM_NATIVE_H_ */
