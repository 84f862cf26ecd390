// SPDX-License-Identifier: Apache-2.0
/* A CUDA device object that a communicator owns, for its staging, its events and its stream. Private to capi. */
#pragma once

#include "backend/device/cuda/cuda_memory.h"
#include "capi/src/context_on_device.h"

typedef struct sluice_own_device_s {
  sluice_device_t* device;
  sluice_allocator_t memory; /* of the device */
} sluice_own_device_t;

/* sources NULL: the driver of this machine. Errors: as sluice_cuda_device_create. */
sluice_status_t sluice_own_device_create(int32_t device_id, const sluice_cuda_sources_t* sources,
                                         sluice_own_device_t** out_own);
/* A communicator's `released`, hence void*. */
void sluice_own_device_release(void* own);
