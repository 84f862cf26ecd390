// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/observed_rates.h"

#include <math.h>
#include <string.h>

#include "backend/cost/fit.h"

#define LEAST_PART 0.1    /* part of the communication lane's time that counts for rows at least */
#define PCIE_BYTES 2.5e10 /* bytes per second of PCIe 4.0 x16 */

static int is_known(int32_t dtype) { return dtype >= 0 && dtype < SLUICE_OBSERVED_DTYPES; }

void sluice_observed_rates_add(sluice_observed_rates_t* observed, int32_t dtype, const sluice_observed_forward_t* p) {
  if (!is_known(dtype) || !(p->flops > 0 && p->compute_seconds > 0 && p->bytes > 0 && p->comm_seconds > 0)) return;
  double rows_seconds = fmax(LEAST_PART * p->comm_seconds, p->comm_seconds - p->num_exchanges * p->startup_seconds);
  observed->rates[dtype][observed->count[dtype]++ % SLUICE_OBSERVED_PASSES] =
      (sluice_plan_rates_t){.flops = p->flops / p->compute_seconds,
                            .link_bytes = p->bytes / rows_seconds,
                            .startup_seconds = p->startup_seconds};
}

static void add(sluice_observed_rate_t* seen, double rate) {
  if (rate > 0) seen->rates[seen->count++ % SLUICE_OBSERVED_PASSES] = rate;
}

void sluice_observed_rates_add_bytes(sluice_observed_rates_t* observed, double memory, double copies) {
  add(&observed->memory, memory);
  add(&observed->copies, copies);
}

/* 0: too few passes measured it. */
static double rate_of(const sluice_observed_rate_t* seen) {
  double rates[SLUICE_OBSERVED_PASSES];
  const int32_t count = seen->count < SLUICE_OBSERVED_PASSES ? seen->count : SLUICE_OBSERVED_PASSES;
  if (count < SLUICE_OBSERVED_LEAST) return 0;
  memcpy(rates, seen->rates, sizeof rates);
  return sluice_median(rates, count);
}

static double copies_of(const sluice_observed_rates_t* observed, double memory, int32_t is_device) {
  const double copies = rate_of(&observed->copies);
  if (copies > 0 || memory <= 0) return copies;
  return is_device ? fmin(memory, PCIE_BYTES) : memory;
}

int sluice_observed_rates_of(const sluice_observed_rates_t* observed, int32_t dtype, int32_t is_device,
                             sluice_plan_rates_t* out) {
  if (!is_known(dtype) || observed->count[dtype] < SLUICE_OBSERVED_LEAST) return 0;
  int32_t count = observed->count[dtype] < SLUICE_OBSERVED_PASSES ? observed->count[dtype] : SLUICE_OBSERVED_PASSES;
  double flops[SLUICE_OBSERVED_PASSES], link[SLUICE_OBSERVED_PASSES], startup[SLUICE_OBSERVED_PASSES];
  for (int32_t i = 0; i < count; ++i) {
    const sluice_plan_rates_t* r = &observed->rates[dtype][i];
    flops[i] = r->flops, link[i] = r->link_bytes, startup[i] = r->startup_seconds;
  }
  const double memory = rate_of(&observed->memory);
  *out = (sluice_plan_rates_t){.flops = sluice_median(flops, count),
                               .link_bytes = sluice_median(link, count),
                               .startup_seconds = sluice_median(startup, count),
                               .memory_bytes = memory,
                               .copy_bytes = copies_of(observed, memory, is_device)};
  return 1;
}
