// SPDX-License-Identifier: Apache-2.0
/* Conformance of devices: the lanes and events of backend/device/device.h. Every implementation passes these cases. */
#pragma once

#include "backend/device/device.h"

typedef struct cts_device_s {
  const char* name;
  sluice_status_t (*create)(sluice_allocator_t* allocator, sluice_device_t** out_device);
  /* Jobs are host functions: the compute lane is the calling thread, every other lane is one thread, created on first
   * use, with signals blocked. 0 for a device whose lanes are streams. */
  int32_t lanes_are_threads;
  /* For a device in virtual time, which runs no job and has no kernels: returns begin and end of each job of the last
   * pass, in whole units of time. NULL: jobs run. */
  void (*times)(const sluice_device_t* device, const double** out_begin, const double** out_end);
} cts_device_t;

/* Runs every case under cmocka; returns the number of failures. */
int cts_device_suite_run(const cts_device_t* device);
