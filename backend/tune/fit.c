#include "backend/tune/fit.h"

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

/* Pools neighbours that fall into their mean, until none does. */
void sluice_make_rising(double* y, int32_t count) {
  double mean[SLUICE_CURVE_POINTS];
  int32_t size[SLUICE_CURVE_POINTS], blocks = 0;
  for (int32_t i = 0; i < count && i < SLUICE_CURVE_POINTS; ++i) {
    mean[blocks] = y[i], size[blocks++] = 1;
    while (blocks > 1 && mean[blocks - 1] < mean[blocks - 2]) {
      int32_t both = size[blocks - 1] + size[blocks - 2];
      mean[blocks - 2] = (mean[blocks - 1] * size[blocks - 1] + mean[blocks - 2] * size[blocks - 2]) / both;
      size[--blocks - 1] = both;
    }
  }
  for (int32_t b = 0, i = 0; b < blocks; ++b) {
    for (int32_t k = 0; k < size[b]; ++k) y[i++] = mean[b];
  }
}

double sluice_fit_skew_gain(const sluice_machine_t* m, double bytes, double seconds) {
  double low = 0, high = 1; /* the more gain, the less time */
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
