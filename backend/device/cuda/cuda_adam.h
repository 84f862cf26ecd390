// SPDX-License-Identifier: Apache-2.0
/* The kernels of adam_kernels.h on a CUDA device. Private to cuda. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_ADAM_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_ADAM_H_

#include "backend/device/adam_kernels.h"

extern const sluice_device_adam_kernels_t sluice_cuda_adam_kernels;

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_ADAM_H_ */
