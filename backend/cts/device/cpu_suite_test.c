// SPDX-License-Identifier: Apache-2.0
/* The suite on the CPU device. */
#include "backend/cts/device/device_suite.h"

int main(void) {
  const cts_device_t device = {.name = "cpu", .create = sluice_cpu_device_create, .lanes_are_threads = 1};
  return cts_device_suite_run(&device);
}
