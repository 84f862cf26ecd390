// SPDX-License-Identifier: Apache-2.0
/* cuBLAS, or the fake one, on the rig's device. */
#ifndef SLUICE_BACKEND_CTS_GPU_GPU_CUBLAS_H_
#define SLUICE_BACKEND_CTS_GPU_GPU_CUBLAS_H_

#include "backend/gemm/cublas/gemm_cublas.h"

/* how: SLUICE_CUBLAS_*. host: the allocator of host memory. The caller destroys the gemm. */
sluice_gemm_t* gpu_cublas_open(int32_t how, sluice_allocator_t* host);

#endif /* SLUICE_BACKEND_CTS_GPU_GPU_CUBLAS_H_ */
