// SPDX-License-Identifier: Apache-2.0
/* The sim device: lanes and events like any device, in virtual time. sim_device_test.c covers shares of speed. */
#include "backend/cts/device/device_suite.h"
#include "backend/device/sim/sim_device.h"

static double cost(void* user, int32_t index) {
  (void)user;
  return 1 + index % 3;
}

static sluice_status_t create(sluice_allocator_t* allocator, sluice_device_t** out_device) {
  const sluice_sim_model_t model = {.cost = cost};
  return sluice_sim_device_create(&model, allocator, out_device);
}

static void times(const sluice_device_t* device, const double** out_begin, const double** out_end) {
  sluice_sim_result_t result;
  sluice_sim_device_result(device, &result);
  *out_begin = result.begin;
  *out_end = result.end;
}

int main(void) {
  const cts_device_t device = {.name = "sim", .create = create, .times = times};
  return cts_device_suite_run(&device);
}
