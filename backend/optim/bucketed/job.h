// SPDX-License-Identifier: Apache-2.0
/* The ops of a step in host memory. Private to backend/optim/bucketed. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_
#define SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_

#include "backend/optim/bucketed/request.h"
#include "backend/optim/buckets/run.h"
#include "backend/optim/lines.h"

/* Elements of a parameter as they were before the step. */
typedef struct sluice_saved_params_s {
  struct sluice_saved_params_s* next;
  void* param;
  uint64_t bytes; /* that follow */
} sluice_saved_params_t;

typedef struct sluice_bucketed_job_s {
  const sluice_bucketed_step_t* step;
  const sluice_lines_t* lines;
  sluice_allocator_t* allocator;
  double grad_scale; /* of updates; the verdict sets it */
  /* Of the lane that sums, and of the one that updates: read once the run is over. */
  uint64_t sum_ns, update_ns, copy_in_ns, copy_out_ns;
  int64_t summed, updated; /* elements */
  int64_t num_sums;
  int32_t is_unsummed; /* a sum has failed here */
  /* Where states lie in a file. */
  int32_t has_begun;                          /* its next step, with the first bucket that is written */
  sluice_state_sum_t sums[SLUICE_NUM_STATES]; /* of what was read */
  sluice_saved_params_t* saved; /* parameters before their update that are not the file's masters, rounded */
  /* Where the plan decides. */
  sluice_adam_scan_t* scans; /* [lines->num_pieces] */
  double norm;
  int32_t is_skipped; /* the run was ended by the verdict */
} sluice_bucketed_job_t;

sluice_status_t sluice_bucketed_job_take_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);
void sluice_bucketed_job_free_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);

/* Their user is a job: states in tensors, and in a file. */
extern const sluice_bucket_mode_t sluice_bucketed_mode, sluice_bucketed_file_mode;

/* Of a step with a file, before its run and after it. */
void sluice_bucketed_job_begin(sluice_bucketed_job_t* job);
/* The run ended with `ran`: the file goes on to the next step, on all ranks or on none, where parameters become again
 * what they were before the step. Errors: `ran`, and what keeps this or another rank. */
sluice_status_t sluice_bucketed_job_end(sluice_bucketed_job_t* job, sluice_status_t ran);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_ */
