// SPDX-License-Identifier: Apache-2.0
/* The suite on the CUDA device with the fake driver. */
#include "backend/cts/device/device_suite.h"
#include "backend/device/cuda/fake/fake_cuda.h"

int main(void) {
  const cts_device_t device = {.name = "cuda", .create = sluice_fake_cuda_device};
  sluice_fake_cuda_reset();
  return cts_device_suite_run(&device);
}
