/* The hazard checker: proves of a template that every run of it, however its lanes interleave, gives the same result.
 *
 * Happens-before is lane order plus the template's dependencies; nothing else is assumed, least of all that the builder
 * made the template. A template without findings has no race on a slot or host buffer, reads nothing that was not
 * written for its chunk, leaves every chunk's output and kept rows in place, frees every slot that it takes once,
 * behind the last op that uses it, and cannot deadlock.
 */
#ifndef SLUICE_BACKEND_SCHEDULE_CHECK_H_
#define SLUICE_BACKEND_SCHEDULE_CHECK_H_

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
  SLUICE_HAZARD_UNDEFINED,   /* a read of what nothing wrote */
  SLUICE_HAZARD_OTHER_CHUNK, /* a read of a slot that holds another chunk's rows by then */
  SLUICE_HAZARD_LOST,        /* an output or kept rows that the pass does not leave in place */
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

/* The first finding in program order; out_finding->hazard is NONE when the template is proved. memory: scratch.
 * Errors: NO_MEMORY. */
sluice_status_t sluice_schedule_check(const sluice_template_t* schedule, sluice_allocator_t* memory,
                                      sluice_finding_t* out_finding);
/* The finding in words: what, which ops, slot, chunk, and the edge that is missing. Returns the length, as snprintf. */
int sluice_finding_describe(const sluice_template_t* schedule, const sluice_finding_t* finding, char* text,
                            uint64_t text_bytes);
/* INVALID_ARGUMENT with that text, or OK. */
sluice_status_t sluice_schedule_check_or_fail(const sluice_template_t* schedule, sluice_allocator_t* memory);

/* Whether two ranks that run these templates issue the same exchanges in the same order. */
int sluice_schedule_same_exchanges(const sluice_template_t* a, const sluice_template_t* b);

#endif /* SLUICE_BACKEND_SCHEDULE_CHECK_H_ */
