// SPDX-License-Identifier: Apache-2.0
/* Times of passes and their ops, implementing device/device_clock.h. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_CLOCK_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_CLOCK_H_

#include "backend/device/device.h"

extern const sluice_device_clock_t sluice_cuda_clock;

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_CLOCK_H_ */
