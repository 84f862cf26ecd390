// SPDX-License-Identifier: Apache-2.0
/* The kernels of adam_kernels.h on a CUDA device. Private to cuda. */
#pragma once

#include "backend/device/adam_kernels.h"

extern const sluice_device_adam_kernels_t sluice_cuda_adam_kernels;
