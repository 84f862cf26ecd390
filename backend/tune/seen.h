/* What passes of this process have shown of its machine, roughly, where none was calibrated: from the lane times that
 * travel in headers, so that all ranks know the same.
 *
 * Only orders that a race then confirms are taken from it: the rates of the plans that a layer begins with under a
 * budget (plan/plan_time.c). Medians of the last forwards, since one may have waited for anything.
 */
#ifndef SLUICE_BACKEND_TUNE_SEEN_H_
#define SLUICE_BACKEND_TUNE_SEEN_H_

#include <stdint.h>

#include "backend/plan/plan.h"

#define SLUICE_SEEN_PASSES 8
#define SLUICE_SEEN_LEAST  3 /* before that, first touches weigh too much */
#define SLUICE_SEEN_DTYPES 5 /* by SLUICE_DTYPE_* */

/* One forward on the rank that computed longest, and on the one that waited least for others. */
typedef struct sluice_seen_pass_s {
  double flops, compute_seconds;
  double bytes, comm_seconds; /* all exchanges of rows together */
  int32_t num_exchanges;
  double startup_seconds; /* of an exchange of next to nothing */
} sluice_seen_pass_t;

typedef struct sluice_seen_s {
  int32_t count[SLUICE_SEEN_DTYPES]; /* ever */
  sluice_plan_rates_t rates[SLUICE_SEEN_DTYPES][SLUICE_SEEN_PASSES];
} sluice_seen_t;

/* A pass without work on one of the lanes says nothing. */
void sluice_seen_add(sluice_seen_t* seen, int32_t dtype, const sluice_seen_pass_t* pass);
/* 0: too few passes of this dtype, and *out_rates is untouched. */
int sluice_seen_rates(const sluice_seen_t* seen, int32_t dtype, sluice_plan_rates_t* out_rates);

#endif /* SLUICE_BACKEND_TUNE_SEEN_H_ */
