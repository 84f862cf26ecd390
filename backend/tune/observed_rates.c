// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/observed_rates.h"

#include <math.h>

#include "backend/cost/fit.h"

#define LEAST_PART 0.1 /* of the communication lane's time is spent on rows, however long start-ups seem */

static int is_known(int32_t dtype) { return dtype >= 0 && dtype < SLUICE_OBSERVED_DTYPES; }

void sluice_observed_rates_add(sluice_observed_rates_t* observed, int32_t dtype, const sluice_observed_forward_t* p) {
  if (!is_known(dtype) || !(p->flops > 0 && p->compute_seconds > 0 && p->bytes > 0 && p->comm_seconds > 0)) return;
  double rows_seconds = fmax(LEAST_PART * p->comm_seconds, p->comm_seconds - p->num_exchanges * p->startup_seconds);
  observed->rates[dtype][observed->count[dtype]++ % SLUICE_OBSERVED_PASSES] =
      (sluice_plan_rates_t){p->flops / p->compute_seconds, p->bytes / rows_seconds, p->startup_seconds};
}

int sluice_observed_rates_of(const sluice_observed_rates_t* observed, int32_t dtype, sluice_plan_rates_t* out) {
  if (!is_known(dtype) || observed->count[dtype] < SLUICE_OBSERVED_LEAST) return 0;
  int32_t count = observed->count[dtype] < SLUICE_OBSERVED_PASSES ? observed->count[dtype] : SLUICE_OBSERVED_PASSES;
  double flops[SLUICE_OBSERVED_PASSES], link[SLUICE_OBSERVED_PASSES], startup[SLUICE_OBSERVED_PASSES];
  for (int32_t i = 0; i < count; ++i) {
    const sluice_plan_rates_t* r = &observed->rates[dtype][i];
    flops[i] = r->flops, link[i] = r->link_bytes, startup[i] = r->startup_seconds;
  }
  *out = (sluice_plan_rates_t){sluice_median(flops, count), sluice_median(link, count), sluice_median(startup, count)};
  return 1;
}
