/* The device's memory as the engine asks for it (device/device_memory.h). */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_DEVICE_MEMORY_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_DEVICE_MEMORY_H_

#include "backend/device/device.h"

extern const sluice_device_memory_t sluice_cuda_memory;

/* What it keeps for the rest. The device is entered if it can be; called by destroy. */
void sluice_cuda_memory_release(sluice_device_t* device);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_DEVICE_MEMORY_H_ */
