// SPDX-License-Identifier: Apache-2.0
/* The program of a batch with the memory that it needs, made when m or the limits change. Private to
 * backend/pipeline/run. */
#ifndef SLUICE_BACKEND_PIPELINE_RUN_PLAN_H_
#define SLUICE_BACKEND_PIPELINE_RUN_PLAN_H_

#include "backend/pipeline/run/values.h"
#include "backend/pipeline/simulate/simulate.h"

typedef struct sluice_stage_record_s {
  uint64_t begin_ns, end_ns;
  uint64_t bytes;
  sluice_message_request_t request; /* of a message that is under way; 0 */
  int32_t was_posted;
  int32_t has_ended;
} sluice_stage_record_t;

typedef struct sluice_stage_plan_s {
  sluice_pipeline_program_t* program; /* NULL: none yet */
  uint64_t fingerprint;               /* of what decides how it runs */
  int32_t num_micro_batches;
  int32_t had_times; /* when it was made */
  int32_t is_chosen; /* L by them */
  int32_t first_op;  /* of this rank's stage, and how many */
  int32_t num_ops;
  sluice_stage_value_t* values;   /* [v][SLUICE_STAGE_VALUE_COUNT][m] */
  sluice_stage_record_t* records; /* by op of the stage */
  uint64_t* tags;                 /* [num_ops]: for the others, when the batch fails */
  int32_t* ends;                  /* ops in the order of their ends */
  int32_t num_ends;
  void* memory;
  uint64_t memory_bytes;
} sluice_stage_plan_t;

/* A plan for m. times: [p * v] of all virtual stages where they are measured, else NULL. Keeps one that fits. Errors:
 * those of sluice_pipeline_program_build and sluice_pipeline_choose; the plan is then empty. */
sluice_status_t sluice_stage_plan_make(sluice_stage_plan_t* plan, const sluice_pipeline_spec_t* agreed, int32_t stage,
                                       int32_t num_micro_batches, int32_t forward_only,
                                       const sluice_stage_times_t* times);
/* Of a simulation with what was measured (NULL: a backward takes as long as two forwards, messages take no time). */
void sluice_stage_fill_times(const sluice_pipeline_spec_t* spec, const sluice_stage_times_t* measured,
                             sluice_pipeline_times_t* out_times);
/* For the next batch. */
void sluice_stage_plan_reset(sluice_stage_plan_t* plan);
void sluice_stage_plan_free(sluice_stage_plan_t* plan);

#endif /* SLUICE_BACKEND_PIPELINE_RUN_PLAN_H_ */
