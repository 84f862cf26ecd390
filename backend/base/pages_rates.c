// SPDX-License-Identifier: Apache-2.0
#include "backend/base/pages_rates.h"

/* After the first ones, one of EVERY is measured; NEWEST is the weight of a new measurement among several. */
enum { EVERY = 16 };
static const double NEWEST = 0.25;
static const double LEAST_GAIN = 0.9;

sluice_pages_rate_t* sluice_pages_rate_of(sluice_pages_rates_t* rates, uint64_t bytes) {
  int size = 0;
  for (uint64_t next = SLUICE_PAGES_LARGE * 4; size + 1 < SLUICE_PAGES_SIZES && bytes >= next; next *= 4) ++size;
  return &rates->sizes[size];
}

int sluice_pages_is_due(sluice_pages_rate_t* rate) {
  if (rate->measured >= SLUICE_PAGES_FIRST && ++rate->asked < EVERY) return 0;
  rate->asked = 0;
  return 1;
}

void sluice_pages_add(sluice_pages_rate_t* rate, const double seconds_per_byte[SLUICE_PAGES_WAYS]) {
  const double least = rate->measured == 0 ? 1.0 : 1.0 / (rate->measured + 1.0);
  const double share = least > NEWEST ? least : NEWEST;
  for (int way = 0; way < SLUICE_PAGES_WAYS; ++way) {
    double* mean = &rate->seconds_per_byte[way];
    *mean += share * (seconds_per_byte[way] - *mean);
  }
  if (rate->measured < UINT32_MAX) ++rate->measured;
}

int sluice_pages_are_better_huge(const sluice_pages_rate_t* rate) {
  const double* took = rate->seconds_per_byte;
  return rate->measured > 0 && took[SLUICE_PAGES_HUGE] < LEAST_GAIN * took[SLUICE_PAGES_SMALL];
}
