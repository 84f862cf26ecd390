/* What the proofs of a template may find: a hazard, and where. */
#ifndef SLUICE_BACKEND_SCHEDULE_CHECK_FINDING_H_
#define SLUICE_BACKEND_SCHEDULE_CHECK_FINDING_H_

#include "backend/schedule/schedule.h"

typedef enum sluice_hazard_e {
  SLUICE_HAZARD_NONE = 0,
  SLUICE_HAZARD_FORM,             /* an index, kind, lane or count out of range */
  SLUICE_HAZARD_DEADLOCK,         /* an op waits for one that is submitted after it, or for itself */
  SLUICE_HAZARD_WRONG_PASS,       /* an op that only the other direction has */
  SLUICE_HAZARD_WRONG_LANE,       /* an op on a lane that its kind does not belong to */
  SLUICE_HAZARD_MISSING_ACCESS,   /* an op that does not declare a tensor which its kind reads or writes */
  SLUICE_HAZARD_READ_AFTER_WRITE, /* a read that may come before the write it needs */
  SLUICE_HAZARD_WRITE_AFTER_READ, /* a write that may come before an earlier reader is done */
  SLUICE_HAZARD_WRITE_AFTER_WRITE,
  SLUICE_HAZARD_UNDEFINED,    /* a read of what nothing wrote */
  SLUICE_HAZARD_OTHER_CHUNK,  /* a read of a slot that holds another chunk's rows by then */
  SLUICE_HAZARD_OTHER_TENSOR, /* a read of a slot that holds another tensor of the chunk by then */
  SLUICE_HAZARD_LOST,         /* an output or kept rows that the pass does not leave in place */
  /* of releases, looked for where there is none of the others */
  SLUICE_HAZARD_DOUBLE_RELEASE, /* a release of a slot that is free already, or that the pass does not own */
  SLUICE_HAZARD_NOT_RELEASED,   /* a slot whose last user does not free it: a leak, or taken again as it is */
  SLUICE_HAZARD_USE_AFTER_RELEASE,
  SLUICE_HAZARD_COUNT
} sluice_hazard_t;

typedef struct sluice_finding_s {
  int32_t hazard; /* sluice_hazard_t */
  int32_t op;     /* index of the op at fault; -1 where none is */
  int32_t other;  /* of the op it conflicts with; -1 */
  int32_t tensor;
  int32_t slot;
  int32_t chunk;
} sluice_finding_t;

/* The finding in words: what, which ops, slot, chunk, and the edge that is missing. Returns the length, as snprintf. */
int sluice_finding_describe(const sluice_template_t* schedule, const sluice_finding_t* finding, char* text,
                            uint64_t text_bytes);

#endif /* SLUICE_BACKEND_SCHEDULE_CHECK_FINDING_H_ */
