// SPDX-License-Identifier: Apache-2.0
/* Comparison of two candidates whose steps alternate: at constant speed, across one change of speed, and with many
 * changes. */
#include <math.h>

#include "backend/tune/race/race_log.h"
#include "third_party/bazel/test.h"

enum { A = 0, B = 5 };

/* "a" and "b" in fast phases, "A" and "B" in slow ones (1.7 times), "w" a warm-up of B; B takes `ratio` times A. */
static sluice_race_log_t log_of(const char* steps, double ratio) {
  sluice_race_log_t log = {0};
  for (const char* at = steps; *at != 0; ++at) {
    int is_b = *at == 'b' || *at == 'B' || *at == 'w', is_slow = *at == 'A' || *at == 'B';
    sluice_race_log_add(&log, is_b ? B : A, 100 * (is_b ? ratio : 1) * (is_slow ? 1.7 : 1) * (*at == 'w' ? 3 : 1),
                        *at == 'w');
  }
  return log;
}

static void expect_ratio(const char* steps, double ratio, int clear) {
  sluice_race_log_t log = log_of(steps, ratio);
  int is_clear = -1;
  double found = sluice_race_log_ratio(&log, B, A, &is_clear);
  assert_true(fabs(found / ratio - 1) < 0.001);
  assert_int_equal(is_clear, clear);
}

TEST(Ratio_WhateverTheMachineDoes_IsThatOfNeighbours) {
  expect_ratio("awababab", 0.87, 1);       /* steady */
  expect_ratio("awabABAB", 0.87, 1);       /* the shortest times agree here */
  expect_ratio("aawBABAB", 0.87, 1);       /* only A was measured in the fast phase: 1.48 by the shortest times */
  expect_ratio("AAwbabab", 0.87, 1);       /* only A was measured in the slow phase: 0.51 */
  expect_ratio("awabABaBAbabab", 0.87, 1); /* steps between neighbours of different speed are ignored */
  expect_ratio("awaBabABab", 0.87, 0);     /* contradictory: the shortest times, and a request for more steps */
}

TEST(Ratio_MissingSteps_IsNone) {
  int is_clear = -1;
  sluice_race_log_t log = log_of("aaw", 1);
  assert_true(sluice_race_log_ratio(&log, B, A, &is_clear) == 0);
  memset(&log, 0, sizeof log);
  assert_true(sluice_race_log_ratio(&log, B, A, &is_clear) == 0);
}

static int losses(const char* steps, double ratio) {
  sluice_race_log_t log = log_of(steps, ratio);
  return sluice_race_log_losses(&log, B, A, 1.15);
}

TEST(Losses_OneSlowPhase_AreNone) {
  assert_int_equal(losses("awaBA", 0.87), 0); /* 1.48 of the step before it */
  assert_int_equal(losses("awaBa", 0.87), 1); /* a slow phase of one step counts once */
  assert_int_equal(losses("awaba", 1.2), 1);
  assert_int_equal(losses("awababa", 1.2), 2);
  assert_int_equal(losses("awabab", 1.2), 1); /* the last step has only one neighbour so far */
  assert_int_equal(losses("awab", 2.1), 2);   /* no change of speed explains it */
  assert_int_equal(losses("awab", 1.9), 0);
}

TEST(Log_Full_ForgetsTheOldest) {
  sluice_race_log_t log = {0};
  for (int i = 0; i < 3 * SLUICE_RACE_LOG; ++i) sluice_race_log_add(&log, i % 2, 100 + i, 0);
  assert_int_equal(log.count, SLUICE_RACE_LOG);
  assert_true((double)log.steps[0].ns_per_row == 100 + 2 * SLUICE_RACE_LOG);
  sluice_race_log_restart(&log, 1);
  assert_int_equal(log.count, 1); /* the newest step is a step of candidate 1 */
  sluice_race_log_restart(&log, 0);
  assert_int_equal(log.count, 0);
}

TEST(Excess_IsOverTheNearestStepOfTheBest) {
  sluice_race_log_t log = log_of("awabAB", 1.2);
  /* The warm-up 260 over a, 20 over a, 34 over A. */
  assert_true(fabs(sluice_race_log_excess(&log, A) - 314) < 0.01);
}
