// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/gpu/gpu_rig.h"

#include <stdio.h>
#include <stdlib.h>

#include "backend/device/cuda/cuda_memory.h"
#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/device/cuda/fake/fake_cuda.h"
#endif

gpu_rig_t gpu_rig;

static sluice_status_t open_device(void) {
#ifdef SLUICE_GPU_SUITE_FAKE
  sluice_fake_cuda_reset();
  return sluice_fake_cuda_device(sluice_process_allocator(), &gpu_rig.device);
#else
  return sluice_cuda_device_create(0, sluice_process_allocator(), &gpu_rig.device);
#endif
}

sluice_status_t gpu_rig_open(void) {
  sluice_status_t status = open_device();
  if (status != SLUICE_OK) return status;
  gpu_rig.driver = sluice_cuda_device_driver(gpu_rig.device);
  sluice_cuda_allocator_init(gpu_rig.device, &gpu_rig.memory);
  return SLUICE_OK;
}

void gpu_rig_close(void) {
  gpu_report("no device memory is left", gpu_rig.memory.num_live == 0 ? NULL : "blocks left");
  sluice_allocator_deinit(&gpu_rig.memory);
  gpu_rig.device->vtable->destroy(gpu_rig.device);
}

void gpu_report(const char* name, const char* problem) {
  gpu_rig.passed += problem == NULL;
  gpu_rig.failed += problem != NULL;
  printf("%s %s%s%s\n", problem == NULL ? "ok  " : "FAIL", name, problem == NULL ? "" : ": ",
         problem == NULL ? "" : problem);
  fflush(stdout); /* keeps the lines if a deadline ends the program */
}

void gpu_die(const char* what) {
  printf("FAIL %s: %s\n", what, last_message());
  exit(1);
}

void gpu_enter(void) {
  if (sluice_cuda_enter(gpu_rig.device) != SLUICE_OK) gpu_die("enter");
}
void gpu_leave(void) {
  if (sluice_cuda_leave(gpu_rig.device) != SLUICE_OK) gpu_die("leave");
}
