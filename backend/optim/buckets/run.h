// SPDX-License-Identifier: Apache-2.0
/* Runs a plan over the lanes of a device. */
#pragma once

#include "backend/device/device.h"
#include "backend/optim/buckets/plan.h"

/* A slot of states: three arrays with the elements of a bucket. All NULL if the plan has no slots. */
typedef struct sluice_bucket_slot_s {
  float *master, *exp_avg, *exp_avg_sq;
} sluice_bucket_slot_t;

/* The bucket or chunk of an op: elements [first, first + count) of all lines, and their slots. */
typedef struct sluice_bucket_part_s {
  int64_t first, count;
  int32_t line;
  sluice_bucket_slot_t slot;
  float* grad;  /* [count], staged; NULL if the plan stages nothing */
  float* grads; /* the first slot of gradients */
} sluice_bucket_part_t;

/* The implementation of ops, by kind: where states come from and go to, and how they are updated. NULL for kinds that
 * its plans do not have. */
typedef struct sluice_bucket_mode_s {
  sluice_status_t (*ops[SLUICE_BUCKET_NUM_KINDS])(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part);
  uint8_t runs_on_failure[SLUICE_BUCKET_NUM_KINDS]; /* 1: it runs after a failure, because other ranks wait for it; if
                                                       it fails itself, the run ends */
} sluice_bucket_mode_t;

/* memory: sluice_bucket_plan_bytes() bytes that the mode's ops can access. Errors: of the device, and of the first op
 * that fails. After a failure only the ops with runs_on_failure run; earlier buckets have been updated. */
sluice_status_t sluice_bucket_run(sluice_device_t* device, const sluice_bucket_plan_t* plan, void* memory,
                                  const sluice_bucket_mode_t* mode, void* user, sluice_stream_t stream);
