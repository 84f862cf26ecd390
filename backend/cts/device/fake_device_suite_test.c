// SPDX-License-Identifier: Apache-2.0
/* A fake without faults behaves like any device. backend/moe/test/ranks_fail_test.c shows the effect of its faults in a
 * pass.
 */
#include "backend/cts/device/device_suite.h"
#include "backend/device/fake/fake_device.h"

static sluice_status_t create(sluice_allocator_t* allocator, sluice_device_t** out_device) {
  sluice_device_t* inner = NULL;
  SLUICE_TRY(sluice_cpu_device_create(allocator, &inner));
  sluice_status_t status = sluice_fake_device_create(inner, out_device);
  if (status != SLUICE_OK) inner->vtable->destroy(inner);
  return status;
}

int main(void) {
  const cts_device_t device = {.name = "fake", .create = create, .lanes_are_threads = 1};
  return cts_device_suite_run(&device);
}
