/* The ops of a step in host memory. Private to backend/optim/bucketed. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_
#define SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_

#include "backend/optim/bucketed/lines.h"
#include "backend/optim/buckets/run.h"

typedef struct sluice_bucketed_job_s {
  const sluice_bucketed_step_t* step;
  const sluice_lines_t* lines;
  double grad_scale; /* of updates; the verdict sets it */
  /* Of the lane that sums, and of the one that updates: read once the run is over. */
  uint64_t sum_ns, update_ns;
  int64_t summed, updated; /* elements */
  int64_t num_sums;
  /* Where the plan decides. */
  sluice_adam_scan_t* scans; /* [lines->num_pieces] */
  double norm;
  int32_t is_skipped; /* the run was ended by the verdict */
} sluice_bucketed_job_t;

sluice_status_t sluice_bucketed_job_take_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);
void sluice_bucketed_job_free_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator);

/* Its user is a job. */
extern const sluice_bucket_mode_t sluice_bucketed_mode;

#endif /* SLUICE_BACKEND_OPTIM_BUCKETED_JOB_H_ */
