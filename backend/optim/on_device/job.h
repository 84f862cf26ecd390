// SPDX-License-Identifier: Apache-2.0
/* The ops of a step on a device. Private to backend/optim/on_device. */
#ifndef SLUICE_BACKEND_OPTIM_ON_DEVICE_JOB_H_
#define SLUICE_BACKEND_OPTIM_ON_DEVICE_JOB_H_

#include "backend/optim/buckets/run.h"
#include "backend/optim/lines.h"

typedef struct sluice_device_job_s {
  sluice_device_t* device;
  const sluice_lines_t* lines;
  double grad_scale;
  void* receive;  /* of sums over ranks (sum.h) */
  int32_t* flags; /* [2], of the device: what looks find (adam_kernels.h) */
} sluice_device_job_t;

/* Their user is a job. A step; and, before one in which a sum may leave f32, its sums alone, which are looked at where
 * buckets would be updated. */
extern const sluice_bucket_mode_t sluice_device_step_mode, sluice_device_look_mode;

#endif /* SLUICE_BACKEND_OPTIM_ON_DEVICE_JOB_H_ */
