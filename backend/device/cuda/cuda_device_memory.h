// SPDX-License-Identifier: Apache-2.0
/* Implements device/device_memory.h for CUDA. */
#pragma once

#include "backend/device/device.h"

extern const sluice_device_memory_t sluice_cuda_memory;

/* Releases the cached blocks. The device is entered if possible; called by destroy. */
void sluice_cuda_memory_release(sluice_device_t* device);
