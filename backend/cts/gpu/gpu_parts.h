// SPDX-License-Identifier: Apache-2.0
/* The parts of gpu_suite, one file each. They run with an open rig, between enter and leave of the device. */
#pragma once

#include <stdint.h>

#include "backend/gemm/cublas/gemm_cublas.h"

void gpu_part_kernels(void);
void gpu_decode(void); /* packed weights, in the part `kernels` */
void gpu_part_routing(void);
void gpu_part_gemm(void);
void gpu_part_gemm_by_rule(void);
void gpu_part_gemm_grouped(void);
void gpu_part_gemm_single(void);
void gpu_part_gemm_lt(void);
void gpu_part_choice(void);
void gpu_part_rates(void);
void gpu_part_streams(void);
void gpu_part_memory(void);
void gpu_part_nccl(void);
void gpu_part_adam(void);
/* A few launches each, for a profiler: two kernels, a grouped and a single GEMM. */
void gpu_part_profile_kernels(void);
void gpu_part_profile_grouped(void);
void gpu_part_profile_single(void);

/* In the part `routing`: random routes, a few of them dropped, ordered by the device. NULL, or the problem. */
const char* gpu_route(int64_t tokens, int64_t top_k, int64_t experts);
void gpu_report_token_copies(void); /* gpu_token_copies.c */

/* cuBLAS, or the fake one, on the rig's device. how: SLUICE_CUBLAS_*. host: the allocator of host memory. The caller
 * destroys the gemm. */
sluice_gemm_t* gpu_cublas_open(int32_t how, sluice_allocator_t* host);
