// SPDX-License-Identifier: Apache-2.0
/* The kernels of the image by number. */
#pragma once

enum {
#define KERNEL(name, args) SLUICE_CUDA_##name,
#define KERNEL_DTYPES(name, args) \
  SLUICE_CUDA_##name, SLUICE_CUDA_##name##_bf16, SLUICE_CUDA_##name##_f16, SLUICE_CUDA_##name##_f64,
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
  SLUICE_CUDA_NUM_KERNELS
};
