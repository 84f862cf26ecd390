/* The ops of a step in host memory. Private to backend/optim/bucketed. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_
#define SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_

#include "backend/optim/bucketed/request.h"
#include "backend/optim/buckets/run.h"
#include "backend/optim/lines.h"

typedef struct sluice_bucketed_job_s {
  const sluice_bucketed_step_t* step;
  const sluice_lines_t* lines;
  double grad_scale; /* of updates; the verdict sets it */
  /* Of the lane that sums, and of the one that updates: read once the run is over. */
  uint64_t sum_ns, update_ns, copy_in_ns, copy_out_ns;
  int64_t summed, updated; /* elements */
  int64_t num_sums;
  int32_t is_unsummed; /* a sum has failed here */
  int32_t has_begun;   /* the file's next step, with the first bucket that is written */
  /* Where the plan decides. */
  sluice_adam_scan_t* scans; /* [lines->num_pieces] */
  double norm;
  int32_t is_skipped; /* the run was ended by the verdict */
} sluice_bucketed_job_t;

sluice_status_t sluice_bucketed_job_take_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);
void sluice_bucketed_job_free_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);

/* Their user is a job: states in tensors, and in a file. */
extern const sluice_bucket_mode_t sluice_bucketed_mode, sluice_bucketed_file_mode;

/* Behind the run of a plan with a file, which ended with `ran`: the file goes on to the next step, on all ranks or on
 * none, where parameters become again what its masters say. Errors: `ran`, and what keeps this or another rank. */
sluice_status_t sluice_bucketed_job_end(const sluice_bucketed_job_t* job, sluice_status_t ran);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_ */
