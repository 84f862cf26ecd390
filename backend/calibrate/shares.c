// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/shares.h"

#include <stdint.h>

static double clamp_share(double share) {
  return share < SLUICE_LEAST_SHARE ? SLUICE_LEAST_SHARE : share > 1 ? 1 : share;
}

void sluice_shares_of_two(const double* alone, const double* together, double* out_share) {
  const int32_t shorter = together[0] <= together[1] ? 0 : 1, longer = 1 - shorter;
  const double both = together[shorter];
  out_share[shorter] = clamp_share(alone[shorter] / both);
  out_share[longer] = clamp_share((alone[longer] - (together[longer] - both)) / both);
}

void sluice_shares_of_three(const double* alone, const double* together, const double (*pair)[3], double* out_share) {
  int32_t by_end[] = {0, 1, 2};
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t j = i + 1; j < 3; ++j) {
      if (together[by_end[j]] >= together[by_end[i]]) continue;
      const int32_t swapped = by_end[i];
      by_end[i] = by_end[j], by_end[j] = swapped;
    }
  }
  const int32_t first = by_end[0], second = by_end[1], last = by_end[2];
  const double all = together[first], two = together[second] - all, one = together[last] - together[second];
  out_share[first] = clamp_share(alone[first] / all);
  out_share[second] = clamp_share((alone[second] - two * pair[second][last]) / all);
  out_share[last] = clamp_share((alone[last] - two * pair[last][second] - one) / all);
}
