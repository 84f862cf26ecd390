// SPDX-License-Identifier: Apache-2.0
/* The table of row kernels (kernels.h) whose entries launch CUDA kernels. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_KERNELS_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_KERNELS_H_

#include "backend/device/kernels.h"

const sluice_kernels_t* sluice_cuda_kernels(void);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_KERNELS_H_ */
