// SPDX-License-Identifier: Apache-2.0
/* The program of a batch and its memory, made when m or the limits change. Private to backend/pipeline/run. */
#pragma once

#include "backend/pipeline/run/values.h"
#include "backend/pipeline/simulate/simulate.h"

typedef struct sluice_stage_record_s {
  uint64_t begin_ns, end_ns;
  uint64_t bytes;
  sluice_message_request_t request; /* of a message in flight; 0: none */
  int32_t was_posted;
  int32_t has_ended;
} sluice_stage_record_t;

typedef struct sluice_stage_plan_s {
  sluice_pipeline_program_t* program; /* NULL: none yet */
  uint64_t fingerprint;               /* of everything that determines its run */
  int32_t num_micro_batches;
  int32_t had_times; /* whether times were known when it was made */
  int32_t is_chosen; /* L was chosen with them */
  int32_t first_op;  /* of this rank's stage, and their number */
  int32_t num_ops;
  sluice_stage_value_t* values;   /* [v][SLUICE_STAGE_VALUE_COUNT][m] */
  sluice_stage_record_t* records; /* by op of the stage */
  uint64_t* tags;                 /* [num_ops]: reported to the other ranks if the batch fails */
  int32_t* ends;                  /* ops in the order in which they ended */
  int32_t num_ends;
  void* memory;
  uint64_t memory_bytes;
} sluice_stage_plan_t;

/* Makes a plan for m. times: [p * v] for all virtual stages if they are measured, else NULL. Keeps the present plan if
 * it still fits. Errors: those of sluice_pipeline_program_build and sluice_pipeline_choose; the plan is then empty. */
sluice_status_t sluice_stage_plan_make(sluice_stage_plan_t* plan, const sluice_pipeline_spec_t* agreed, int32_t stage,
                                       int32_t num_micro_batches, int32_t forward_only,
                                       const sluice_stage_times_t* times);
/* Fills the times of a simulation from the measured ones (NULL: a backward takes as long as two forwards, messages take
 * no time). */
void sluice_stage_fill_times(const sluice_pipeline_spec_t* spec, const sluice_stage_times_t* measured,
                             sluice_pipeline_times_t* out_times);
/* Prepares the plan for the next batch. */
void sluice_stage_plan_reset(sluice_stage_plan_t* plan);
void sluice_stage_plan_free(sluice_stage_plan_t* plan);
