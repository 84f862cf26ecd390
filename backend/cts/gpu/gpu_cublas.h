// SPDX-License-Identifier: Apache-2.0
/* cuBLAS, or the fake one, on the rig's device. */
#pragma once

#include "backend/gemm/cublas/gemm_cublas.h"

/* how: SLUICE_CUBLAS_*. host: the allocator of host memory. The caller destroys the gemm. */
sluice_gemm_t* gpu_cublas_open(int32_t how, sluice_allocator_t* host);
