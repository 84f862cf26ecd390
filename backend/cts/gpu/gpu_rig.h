// SPDX-License-Identifier: Apache-2.0
/* Shared by all parts of gpu_suite: the device, its memory and driver, and the drop counters of cases. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/test/last_error.h"
#include "backend/device/cuda/cuda_device.h"

/* If 1, sizes are tiny and times are meaningless. */
#ifdef SLUICE_GPU_SUITE_FAKE
enum { GPU_IS_FAKE = 1 };
#else
enum { GPU_IS_FAKE = 0 };
#endif

typedef struct gpu_rig_s {
  sluice_device_t* device;
  sluice_allocator_t memory; /* the device's */
  const sluice_cuda_driver_t* driver;
  int passed, failed;
} gpu_rig_t;

extern gpu_rig_t gpu_rig; /* the only one of the program */

/* NOT_FOUND: no GPU here. */
sluice_status_t gpu_rig_open(void);
/* Reports leaks of device memory. */
void gpu_rig_close(void);

/* A case: NULL is a pass, else the problem. */
void gpu_report(const char* name, const char* problem);
/* Ends the program if it cannot continue. */
void gpu_die(const char* what);

/* The context of the device is current between enter and leave. Calls may nest. */
void gpu_enter(void);
void gpu_leave(void);
