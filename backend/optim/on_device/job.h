// SPDX-License-Identifier: Apache-2.0
/* The ops of a step on a device. Private to backend/optim/on_device. */
#pragma once

#include "backend/optim/buckets/run.h"
#include "backend/optim/lines.h"

typedef struct sluice_device_job_s {
  sluice_device_t* device;
  const sluice_lines_t* lines;
  double grad_scale;
  void* receive;  /* receive buffer of sums over ranks (sum.h) */
  int32_t* flags; /* [2], on the device: results of scans (adam_kernels.h) */
} sluice_device_job_t;

/* `user` is a sluice_device_job_t. One mode runs a step. The other one runs before a step in which a sum may overflow
 * f32: it forms the sums and scans them in place of updates. */
extern const sluice_bucket_mode_t sluice_device_step_mode, sluice_device_look_mode;
