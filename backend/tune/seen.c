#include "backend/tune/seen.h"

#include <math.h>

#include "backend/cost/fit.h"

#define LEAST_PART 0.1 /* of the communication lane's time, which rows take however long their start-ups seem */

static int is_known(int32_t dtype) { return dtype >= 0 && dtype < SLUICE_SEEN_DTYPES; }

void sluice_seen_add(sluice_seen_t* seen, int32_t dtype, const sluice_seen_pass_t* p) {
  if (!is_known(dtype) || !(p->flops > 0 && p->compute_seconds > 0 && p->bytes > 0 && p->comm_seconds > 0)) return;
  double rows_seconds = fmax(LEAST_PART * p->comm_seconds, p->comm_seconds - p->num_exchanges * p->startup_seconds);
  seen->rates[dtype][seen->count[dtype]++ % SLUICE_SEEN_PASSES] =
      (sluice_plan_rates_t){p->flops / p->compute_seconds, p->bytes / rows_seconds, p->startup_seconds};
}

int sluice_seen_rates(const sluice_seen_t* seen, int32_t dtype, sluice_plan_rates_t* out) {
  if (!is_known(dtype) || seen->count[dtype] < SLUICE_SEEN_LEAST) return 0;
  int32_t count = seen->count[dtype] < SLUICE_SEEN_PASSES ? seen->count[dtype] : SLUICE_SEEN_PASSES;
  double flops[SLUICE_SEEN_PASSES], link[SLUICE_SEEN_PASSES], startup[SLUICE_SEEN_PASSES];
  for (int32_t i = 0; i < count; ++i) {
    const sluice_plan_rates_t* r = &seen->rates[dtype][i];
    flops[i] = r->flops, link[i] = r->link_bytes, startup[i] = r->startup_seconds;
  }
  *out = (sluice_plan_rates_t){sluice_median(flops, count), sluice_median(link, count), sluice_median(startup, count)};
  return 1;
}
