// SPDX-License-Identifier: Apache-2.0
#include "backend/cost/fit.h"

#include <math.h>
#include <stdlib.h>

static int by_value(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return x < y ? -1 : x > y;
}

double sluice_median(double* values, int32_t count) {
  qsort(values, (size_t)count, sizeof *values, by_value);
  return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double sluice_quantile(double* values, int32_t count, double share) {
  qsort(values, (size_t)count, sizeof *values, by_value);
  int32_t at = (int32_t)ceil(share * count) - 1;
  return values[at < 0 ? 0 : at];
}

void sluice_make_rising(double* y, int32_t count) {
  for (int32_t i = count - 2; i >= 0; --i) y[i] = fmin(y[i], y[i + 1]);
}

double sluice_fit_skew_gain(const sluice_machine_t* m, double bytes, double seconds) {
  double low = 0, high = 1; /* the larger the gain, the less time */
  for (int32_t i = 0; i < 30; ++i) {
    sluice_machine_t tried = *m;
    tried.exchange_skew_gain = (low + high) / 2;
    double counts_as = sluice_machine_skewed_bytes(&tried, bytes, bytes / m->world_size);
    if (sluice_machine_exchange(m, m->world_size, counts_as) > seconds) {
      low = tried.exchange_skew_gain;
    } else {
      high = tried.exchange_skew_gain;
    }
  }
  return (low + high) / 2;
}
