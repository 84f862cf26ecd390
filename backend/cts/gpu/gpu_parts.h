// SPDX-License-Identifier: Apache-2.0
/* The parts of gpu_suite, one file each. They run with an open rig, between enter and leave of the device. */
#pragma once

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
