/* Kernels by number, and their launch; between the device and its users in this folder. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_LAUNCH_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_LAUNCH_H_

#include "backend/device/cuda/cuda_device.h"
#include "backend/device/cuda/kernels/kernel_args.h"

enum {
#define KERNEL(name, args) SLUICE_CUDA_##name,
#define KERNEL_DTYPES(name, args) \
  SLUICE_CUDA_##name, SLUICE_CUDA_##name##_bf16, SLUICE_CUDA_##name##_f16, SLUICE_CUDA_##name##_f64,
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
  SLUICE_CUDA_NUM_KERNELS
};

/* Launches `kernel` over `units` units, `args` being its argument struct, on the device that this thread has entered.
 * A failure is kept for sluice_cuda_leave. */
void sluice_cuda_launch(int32_t kernel, sluice_stream_t stream, const void* args, int64_t units);

/* The first failure of a launch since enter, with its record as this thread's; leave reports it too. */
sluice_status_t sluice_cuda_launch_status(void);

const sluice_kernels_t* sluice_cuda_kernels(void);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_LAUNCH_H_ */
