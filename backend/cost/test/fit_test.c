// SPDX-License-Identifier: Apache-2.0
/* Medians, quantiles and curves fitted to noisy measurements. */
#include <math.h>

#include "backend/cost/fit.h"
#include "third_party/bazel/test.h"

TEST(Median_OddEvenAndOutlier_IsTheMiddle) {
  double odd[] = {5, 1, 1000}, even[] = {4, 1, 2, 3}, one[] = {7};
  assert_true(sluice_median(odd, 3) == 5 && sluice_median(even, 4) == 2.5 && sluice_median(one, 1) == 7);
}

TEST(Quantile_NearestRank) {
  double v[] = {10, 9, 8, 7, 6, 5, 4, 3, 2, 1};
  assert_true(sluice_quantile(v, 10, 0.9) == 9 && sluice_quantile(v, 10, 1) == 10 && sluice_quantile(v, 10, 0) == 1);
}

TEST(Rising_WhatLaterOnesFallBelow_TakesNoMoreThanThey) {
  double y[] = {1, 3, 2, 4, 9, 6, 3};
  sluice_make_rising(y, 7);
  const double want[] = {1, 2, 2, 3, 3, 3, 3};
  for (int i = 0; i < 7; ++i) assert_true(y[i] == want[i]);
  double rising[] = {1, 2, 2, 5};
  sluice_make_rising(rising, 4);
  assert_true(rising[0] == 1 && rising[1] == 2 && rising[2] == 2 && rising[3] == 5);
  double falling[] = {3, 2, 1};
  sluice_make_rising(falling, 3);
  assert_true(falling[0] == 1 && falling[1] == 1 && falling[2] == 1);
}

/* 2 ns a byte; one of four ranks receives 1 MB, so the average is 0.25 MB. */
TEST(SkewGain_BetweenFullestAndMean_IsWhereTheTimeLies) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.world_size = 4, m.exchange.startup_seconds = 1e-4;
  m.exchange.bytes = (sluice_curve_t){1, {1}, {2e-9}};
  static const struct {
    double seconds, gain;
  } cases[] = {{2.1e-3, 0}, {9e-3, 0}, {1.35e-3, 0.5}, {6e-4, 1}, {1e-5, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    assert_true(fabs(sluice_fit_skew_gain(&m, 1e6, cases[i].seconds) - cases[i].gain) < 1e-6);
  }
}
