// SPDX-License-Identifier: Apache-2.0
/* Runs a plan over the lanes of a device. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETS_RUN_H_
#define SLUICE_BACKEND_OPTIM_BUCKETS_RUN_H_

#include "backend/device/device.h"
#include "backend/optim/buckets/plan.h"

/* A slot of states: three arrays of a bucket's elements. All NULL where the plan has no slots. */
typedef struct sluice_bucket_slot_s {
  float *master, *exp_avg, *exp_avg_sq;
} sluice_bucket_slot_t;

/* The bucket or chunk of an op: elements [first, first + count) of all lines, and where they are worked on. */
typedef struct sluice_bucket_part_s {
  int64_t first, count;
  int32_t line;
  sluice_bucket_slot_t slot;
  float* grad;  /* [count], staged; NULL where the plan stages nothing */
  float* grads; /* where the slots of gradients begin */
} sluice_bucket_part_t;

/* What ops do, by kind: where states come from and go to, and who updates. NULL for kinds that no plan of it has. */
typedef struct sluice_bucket_mode_s {
  sluice_status_t (*ops[SLUICE_BUCKET_NUM_KINDS])(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part);
  uint8_t runs_on_failure[SLUICE_BUCKET_NUM_KINDS]; /* 1: other ranks wait for it; ends all where it fails itself */
} sluice_bucket_mode_t;

/* memory: sluice_bucket_plan_bytes(), where the mode's ops can reach it. Errors: of the device and of the first op that
 * fails, behind which no other runs but those that run on failure; updates of buckets before it have happened. */
sluice_status_t sluice_bucket_run(sluice_device_t* device, const sluice_bucket_plan_t* plan, void* memory,
                                  const sluice_bucket_mode_t* mode, void* user, sluice_stream_t stream);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETS_RUN_H_ */
