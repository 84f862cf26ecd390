// SPDX-License-Identifier: Apache-2.0
/* The faults that the checker may find in a stage program, and their place. */
#pragma once

#include "backend/pipeline/program.h"

typedef enum sluice_pipeline_fault_e {
  SLUICE_PIPELINE_FAULT_NONE = 0,
  SLUICE_PIPELINE_FAULT_FORM,    /* an index, kind or count out of range; an op repeated or missing */
  SLUICE_PIPELINE_FAULT_ACCESS,  /* an op that does not declare the accesses of its kind, at its micro-batch's slot */
  SLUICE_PIPELINE_FAULT_MESSAGE, /* a send without a receive at that stage, or vice versa */
  SLUICE_PIPELINE_FAULT_OVERWRITTEN,  /* a slot is overwritten before its last reader or writer has ended */
  SLUICE_PIPELINE_FAULT_UNDEFINED,    /* a slot is read before its writer has written it */
  SLUICE_PIPELINE_FAULT_IN_FLIGHT,    /* more micro-batches in flight, or held, than the limit */
  SLUICE_PIPELINE_FAULT_COLUMN_ORDER, /* replicas of a stage wait in collectives of different ops */
  SLUICE_PIPELINE_FAULT_DEADLOCK,     /* no op can run and some have not ended */
  SLUICE_PIPELINE_FAULT_COUNT
} sluice_pipeline_fault_t;

typedef struct sluice_pipeline_finding_s {
  int32_t fault; /* SLUICE_PIPELINE_FAULT_* */
  int32_t op;    /* of the program, at fault or the first that waits; -1 if there is none */
  int32_t other; /* the conflicting op; -1: none */
  int32_t replica;
  int64_t events; /* before the fault, in the order of the checker */
} sluice_pipeline_finding_t;

/* Describes the fault with its ops. Returns the length, as snprintf. */
int sluice_pipeline_finding_describe(const sluice_pipeline_program_t* program, const sluice_pipeline_finding_t* finding,
                                     char* text, size_t room);
