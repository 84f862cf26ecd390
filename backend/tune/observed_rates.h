/* What passes of this process have shown of its machine, roughly, where none was calibrated: from the lane times that
 * travel in headers, so that all ranks know the same.
 *
 * Only orders that a race then confirms are taken from it: the rates of the plans that a layer begins with under a
 * budget (plan/plan_time.c). Medians of the last forwards, since one may have waited for anything.
 */
#ifndef SLUICE_BACKEND_TUNE_OBSERVED_RATES_H_
#define SLUICE_BACKEND_TUNE_OBSERVED_RATES_H_

#include <stdint.h>

#include "backend/plan/plan.h"

#define SLUICE_OBSERVED_PASSES 8
#define SLUICE_OBSERVED_LEAST  3 /* before that, first touches weigh too much */
#define SLUICE_OBSERVED_DTYPES 5 /* by SLUICE_DTYPE_* */

/* One forward on the rank that computed longest, and on the one that waited least for others. */
typedef struct sluice_observed_forward_s {
  double flops, compute_seconds;
  double bytes, comm_seconds; /* all exchanges of rows together */
  int32_t num_exchanges;
  double startup_seconds; /* of an exchange of next to nothing */
} sluice_observed_forward_t;

typedef struct sluice_observed_rates_s {
  int32_t count[SLUICE_OBSERVED_DTYPES]; /* ever */
  sluice_plan_rates_t rates[SLUICE_OBSERVED_DTYPES][SLUICE_OBSERVED_PASSES];
} sluice_observed_rates_t;

/* A pass without work on one of the lanes says nothing. */
void sluice_observed_rates_add(sluice_observed_rates_t* observed, int32_t dtype, const sluice_observed_forward_t* pass);
/* 0: too few passes of this dtype, and *out_rates is untouched. */
int sluice_observed_rates_of(const sluice_observed_rates_t* observed, int32_t dtype, sluice_plan_rates_t* out_rates);

#endif /* SLUICE_BACKEND_TUNE_OBSERVED_RATES_H_ */
