// SPDX-License-Identifier: Apache-2.0
/* A device for tests that wraps another one, records the sequence of submitted jobs, and fails on command. */
#pragma once

#include "backend/device/device.h"

enum {
  SLUICE_FAKE_DEVICE_BEGIN = 0,  /* begin fails; there is nothing to join */
  SLUICE_FAKE_DEVICE_SUBMIT = 1, /* submit fails; the job does not exist, and earlier ones must still be joined */
  SLUICE_FAKE_DEVICE_JOB = 2     /* the job fails instead of running */
};

typedef struct sluice_fake_device_fault_s {
  int32_t on;     /* SLUICE_FAKE_DEVICE_* */
  uint64_t nth;   /* counted from 0 over all begins, or over all submits, since creation */
  int32_t status; /* the reported status */
} sluice_fake_device_fault_t;

typedef struct sluice_fake_submit_s {
  uint64_t pass; /* from 0 */
  int32_t index;
  int32_t lane;
  int32_t num_waits;
  int32_t run_on_failure;
} sluice_fake_submit_t;

enum { SLUICE_FAKE_DEVICE_MAX_FAULTS = 8, SLUICE_FAKE_DEVICE_MAX_SUBMITS = 4096 };

/* inner: consumed, destroyed with the fake. out_device: new, release with device->vtable->destroy; it has inner's
 * kernels. Errors: NO_MEMORY (inner stays the caller's). */
sluice_status_t sluice_fake_device_create(sluice_device_t* inner, sluice_device_t** out_device);
/* Adds a fault; at most SLUICE_FAKE_DEVICE_MAX_FAULTS, each fires once. Between passes. */
void sluice_fake_device_inject(sluice_device_t* device, const sluice_fake_device_fault_t* fault);
/* Returns the number of submits; out_submits has the first SLUICE_FAKE_DEVICE_MAX_SUBMITS, borrowed until destroy. */
uint64_t sluice_fake_device_submits(const sluice_device_t* device, const sluice_fake_submit_t** out_submits);
