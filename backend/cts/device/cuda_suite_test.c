// SPDX-License-Identifier: Apache-2.0
/* The suite on the CUDA device with the fake driver. */
#include "backend/cts/device/device_suite.h"
#include "backend/device/cuda/fake/fake_cuda.h"

static sluice_status_t create(sluice_allocator_t* allocator, sluice_device_t** out_device) {
  return sluice_cuda_device_create_from(sluice_fake_cuda_driver(), sluice_fake_cuda_image(), 0, allocator, out_device);
}

int main(void) {
  const cts_device_t device = {.name = "cuda", .create = create};
  sluice_fake_cuda_reset();
  return cts_device_suite_run(&device);
}
