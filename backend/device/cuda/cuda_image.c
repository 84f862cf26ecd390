// SPDX-License-Identifier: Apache-2.0
/* The image of the kernels, which the build puts into read-only data (cuda_image.S). */
#include "backend/device/cuda/cuda_device.h"

extern const char sluice_cuda_image_begin[];
extern const char sluice_cuda_image_end[];

sluice_cuda_image_t sluice_cuda_image(void) {
  return (sluice_cuda_image_t){sluice_cuda_image_begin, (uint64_t)(sluice_cuda_image_end - sluice_cuda_image_begin)};
}
