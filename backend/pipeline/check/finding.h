/* What the checker may find in a stage program: a fault, and where. */
#ifndef SLUICE_BACKEND_PIPELINE_CHECK_FINDING_H_
#define SLUICE_BACKEND_PIPELINE_CHECK_FINDING_H_

#include "backend/pipeline/program.h"

typedef enum sluice_pipeline_fault_e {
  SLUICE_PIPELINE_FAULT_NONE = 0,
  SLUICE_PIPELINE_FAULT_FORM,         /* an index, kind or count out of range; an op twice or missing */
  SLUICE_PIPELINE_FAULT_ACCESS,       /* an op that does not declare what its kind touches, at its micro-batch's slot */
  SLUICE_PIPELINE_FAULT_MESSAGE,      /* a send that no receive awaits at that stage, or the other way round */
  SLUICE_PIPELINE_FAULT_OVERWRITTEN,  /* a slot is written before its last reader or writer is done with it */
  SLUICE_PIPELINE_FAULT_UNDEFINED,    /* a slot is read before its writer has written it */
  SLUICE_PIPELINE_FAULT_IN_FLIGHT,    /* more micro-batches in flight, or held, than the limit */
  SLUICE_PIPELINE_FAULT_COLUMN_ORDER, /* replicas of a stage wait in collectives of different ops */
  SLUICE_PIPELINE_FAULT_DEADLOCK,     /* nothing can move and not all has ended */
  SLUICE_PIPELINE_FAULT_COUNT
} sluice_pipeline_fault_t;

typedef struct sluice_pipeline_finding_s {
  int32_t fault; /* SLUICE_PIPELINE_FAULT_* */
  int32_t op;    /* of the program, at fault or the first that waits; -1 where none is */
  int32_t other; /* that it conflicts with; -1 */
  int32_t replica;
  int64_t events; /* that led there in the order which the checker tried */
} sluice_pipeline_finding_t;

/* The fault in words, with its ops. Returns the length, as snprintf. */
int sluice_pipeline_finding_describe(const sluice_pipeline_program_t* program, const sluice_pipeline_finding_t* finding,
                                     char* text, size_t room);

#endif /* SLUICE_BACKEND_PIPELINE_CHECK_FINDING_H_ */
