/* How fast the row kernels and the routing run at the benchmarks' shapes, beside a copy on the device: what to look at
 * first where a layer is slower than its products. Part of gpu_suite. */
#ifndef SLUICE_BACKEND_CTS_GPU_GPU_RATES_H_
#define SLUICE_BACKEND_CTS_GPU_GPU_RATES_H_

#include "backend/device/cuda/cuda_device.h"

/* Prints a line per kernel and shape. The device is entered; memory: the device's. NULL, or what failed. is_slow: tiny
 * sizes, times that say nothing. */
const char* gpu_rates(sluice_device_t* device, sluice_allocator_t* memory, int is_slow);

#endif /* SLUICE_BACKEND_CTS_GPU_GPU_RATES_H_ */
