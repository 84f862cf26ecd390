// SPDX-License-Identifier: Apache-2.0
/* What a step in buckets is asked to do. Plain data. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETED_REQUEST_H_
#define SLUICE_BACKEND_OPTIM_BUCKETED_REQUEST_H_

#include "backend/comm/comm.h"
#include "backend/optim/adam_step.h"
#include "backend/optim/file/state_file.h"

typedef struct sluice_bucketed_step_s {
  sluice_adam_step_t adam;
  sluice_comm_t* comm;         /* all ranks that step together; NULL: one */
  sluice_comm_t* const* comms; /* [adam.num_groups] whose gradients of a group are summed: comm, or a part of it */
  sluice_state_file_t* file;   /* where masters and moments lie, at the step before; NULL: in tensors */
  int64_t bucket;              /* elements */
  int64_t chunk;               /* k; 0: chosen by what was measured */
  sluice_status_t refused;     /* what this rank has come with, told to the others: its record is this thread's */
} sluice_bucketed_step_t;

#endif /* SLUICE_BACKEND_OPTIM_BUCKETED_REQUEST_H_ */
