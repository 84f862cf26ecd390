#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backend/cost/fit.h"

static void Median_OddEvenAndOutlier_IsTheMiddle(void** state) {
  (void)state;
  double odd[] = {5, 1, 1000}, even[] = {4, 1, 2, 3}, one[] = {7};
  assert_true(sluice_median(odd, 3) == 5 && sluice_median(even, 4) == 2.5 && sluice_median(one, 1) == 7);
}

static void Quantile_NearestRank(void** state) {
  (void)state;
  double v[] = {10, 9, 8, 7, 6, 5, 4, 3, 2, 1};
  assert_true(sluice_quantile(v, 10, 0.9) == 9 && sluice_quantile(v, 10, 1) == 10 && sluice_quantile(v, 10, 0) == 1);
}

static void Rising_WhatLaterOnesFallBelow_TakesNoMoreThanThey(void** state) {
  (void)state;
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
static void SkewGain_BetweenFullestAndMean_IsWhereTheTimeLies(void** state) {
  (void)state;
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Median_OddEvenAndOutlier_IsTheMiddle),
      cmocka_unit_test(Quantile_NearestRank),
      cmocka_unit_test(Rising_WhatLaterOnesFallBelow_TakesNoMoreThanThey),
      cmocka_unit_test(SkewGain_BetweenFullestAndMean_IsWhereTheTimeLies),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
