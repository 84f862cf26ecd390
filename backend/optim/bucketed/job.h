// SPDX-License-Identifier: Apache-2.0
/* The ops of a step in host memory. Private to backend/optim/bucketed. */
#pragma once

#include "backend/optim/bucketed/request.h"
#include "backend/optim/buckets/run.h"
#include "backend/optim/lines.h"

/* Elements of a parameter before the step. */
typedef struct sluice_saved_params_s {
  struct sluice_saved_params_s* next;
  void* param;
  uint64_t bytes; /* of the elements, which follow this struct */
} sluice_saved_params_t;

typedef struct sluice_bucketed_job_s {
  const sluice_bucketed_step_t* step;
  const sluice_lines_t* lines;
  sluice_allocator_t* allocator;
  double grad_scale; /* of updates; set by the verdict */
  /* Times of the sum lane and of the update lane. Valid after the run. */
  uint64_t sum_ns, update_ns, copy_in_ns, copy_out_ns;
  int64_t summed, updated; /* elements */
  int64_t num_sums;
  int32_t is_unsummed; /* a sum failed on this rank */
  /* Only for states in a file. */
  int32_t has_begun; /* the file's next step has begun, with the first bucket that was written */
  sluice_state_sum_t sums[SLUICE_NUM_STATES]; /* checksums of what was read */
  sluice_saved_params_t* saved; /* earlier values of parameters that are not the file's masters, rounded */
  /* Only if the plan decides. */
  sluice_adam_scan_t* scans; /* [lines->num_pieces] */
  double norm;
  int32_t is_skipped; /* the verdict ended the run */
} sluice_bucketed_job_t;

sluice_status_t sluice_bucketed_job_take_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);
void sluice_bucketed_job_free_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);

/* Modes for states in tensors and in a file. `user` is a sluice_bucketed_job_t. */
extern const sluice_bucket_mode_t sluice_bucketed_mode, sluice_bucketed_file_mode;

/* Call before and after the run of a step with a file. */
void sluice_bucketed_job_begin(sluice_bucketed_job_t* job);
/* ran: how the run ended. The file advances to the next step on all ranks or on none; on none, parameters are restored
 * to their values before the step. Errors: `ran`, or an error of this or another rank's file. */
sluice_status_t sluice_bucketed_job_end(sluice_bucketed_job_t* job, sluice_status_t ran);
