// SPDX-License-Identifier: Apache-2.0
/* The arguments of a step in buckets. Plain data. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/optim/adam_step.h"
#include "backend/optim/file/state_file.h"

typedef struct sluice_bucketed_step_s {
  sluice_adam_step_t adam;
  sluice_comm_t* comm; /* all ranks that step together; NULL: one rank */
  sluice_comm_t* const*
      comms; /* [adam.num_groups], over which the gradients of each group are summed: comm, or some of its ranks */
  sluice_state_file_t* file; /* contains masters and moments, at the step before; NULL: they are in tensors */
  int64_t bucket;            /* elements */
  int64_t chunk;             /* k; 0: chosen by measurements */
  sluice_status_t refused; /* an earlier error of this rank, reported to the other ranks; its record is this thread's */
} sluice_bucketed_step_t;
