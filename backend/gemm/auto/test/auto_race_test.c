// SPDX-License-Identifier: Apache-2.0
/* A race with made-up times: what is measured when, which kinds leave, and when it is over. */
#include <math.h>

#include "backend/gemm/auto/auto_race.h"
#include "third_party/bazel/test.h"

#define FLOP 1e9

/* Seconds of a run of each kind. */
static const double takes[SLUICE_RACE_KINDS] = {0.010, 0.060, 0.009, 0.012};

/* Makes calls of 0.020 s until the race is over. out_most: the longest time that measurements added to a call. */
static int run(sluice_gemm_race_t* race, uint32_t kinds, double* out_most) {
  *race = (sluice_gemm_race_t){0};
  sluice_gemm_race_earn(race, 0.020, 2 * FLOP);
  sluice_gemm_race_start(race, kinds);
  *out_most = 0;
  for (int calls = 1; calls < 1000; ++calls) {
    double extra = 0;
    for (int kind; (kind = sluice_gemm_race_next(race, FLOP)) >= 0;) {
      sluice_gemm_race_ran(race, kind, takes[kind], FLOP);
      extra += takes[kind];
    }
    if (extra > *out_most) *out_most = extra;
    if (sluice_gemm_race_is_over(race)) return calls;
    sluice_gemm_race_earn(race, 0.020, 2 * FLOP);
  }
  return 0;
}

TEST(Race_BeforeTheFirstCall_RunsNothing) {
  sluice_gemm_race_t race = {0};
  sluice_gemm_race_start(&race, 0xf);
  assert_int_equal(sluice_gemm_race_next(&race, FLOP), -1);
  for (int call = 0; call < 3; ++call) {
    sluice_gemm_race_earn(&race, 0.020, 2 * FLOP); /* a credit of 2.5 ms; a run is expected to take 10 ms */
    assert_int_equal(sluice_gemm_race_next(&race, FLOP), -1);
  }
  sluice_gemm_race_earn(&race, 0.020, 2 * FLOP);
  assert_int_equal(sluice_gemm_race_next(&race, FLOP), 0);
}

/* As many calls of a class as the first step of a model with 32 layers makes. */
TEST(Race_FirstCalls_PayForHalfAsMuch) {
  sluice_gemm_race_t race = {0};
  double measured = 0, most = 0;
  for (int call = 0; call < 32; ++call) {
    for (int kind; (kind = sluice_gemm_race_next(&race, FLOP)) >= 0;) {
      sluice_gemm_race_ran(&race, kind, 0.004, FLOP);
      measured += 0.004;
    }
    if (call == 0) sluice_gemm_race_start(&race, 0xf);
    sluice_gemm_race_earn(&race, 0.020, 2 * FLOP);
    most += 0.125 * 0.020;
    assert_true(measured <= most + 1e-9);
  }
  assert_true(measured > 0.5 * most && !sluice_gemm_race_is_over(&race));
}

/* In the long run all runs take a quarter of the time of calls, even if one candidate overdraws the credit. */
TEST(Race_AllCalls_PayForAllRuns) {
  sluice_gemm_race_t race;
  double most = 0;
  const int calls = run(&race, 0xf, &most);
  assert_true(calls > 0);
  assert_true(race.credit >= -0.060);
  assert_true(most <= 0.060 + 0.005);
  const double measured = 0.25 * 0.020 * calls - race.credit;
  assert_true(measured <= 0.25 * 0.020 * calls + 0.060);
  assert_true(race.best[2] < race.best[0] && race.best[0] < race.best[3]);
}

TEST(Race_MuchSlower_LeavesAfterThreeRounds) {
  sluice_gemm_race_t race = {0};
  sluice_gemm_race_earn(&race, 1000, 1000 * FLOP);
  sluice_gemm_race_start(&race, 0x3);
  int runs[SLUICE_RACE_KINDS] = {0};
  for (int kind; (kind = sluice_gemm_race_next(&race, FLOP)) >= 0; ++runs[kind]) {
    sluice_gemm_race_ran(&race, kind, kind == 0 ? 1e-4 : 1e-3, FLOP);
  }
  assert_int_equal(runs[0], 4); /* after that kind 0 is alone */
  assert_int_equal(runs[1], 4); /* one run that does not count, three that do */
  assert_true(race.best[1] > race.best[0]);
}

TEST(Race_FirstRound_DoesNotCount) {
  sluice_gemm_race_t race = {0};
  sluice_gemm_race_earn(&race, 1000, 1000 * FLOP);
  sluice_gemm_race_start(&race, 0x5);
  sluice_gemm_race_ran(&race, 0, 1, FLOP);
  assert_true(isinf(race.best[0]));
  sluice_gemm_race_ran(&race, 2, 1e-9, FLOP); /* implausibly fast, in a round that does not count */
  assert_true(isinf(race.best[2]));
  assert_int_equal(sluice_gemm_race_next(&race, FLOP), 0);
  assert_true(race.spent == 0);
}

TEST(Race_Declining_LeavesAtOnce) {
  sluice_gemm_race_t race = {0};
  sluice_gemm_race_earn(&race, 1000, 1000 * FLOP);
  sluice_gemm_race_start(&race, 0x9);
  sluice_gemm_race_ran(&race, 0, 1, FLOP);
  sluice_gemm_race_ran(&race, 3, INFINITY, FLOP);
  int runs = 0;
  for (int kind; (kind = sluice_gemm_race_next(&race, FLOP)) >= 0; ++runs) {
    assert_int_equal(kind, 0);
    sluice_gemm_race_ran(&race, kind, 1, FLOP);
  }
  assert_int_equal(runs, 1);
  assert_true(sluice_gemm_race_is_over(&race) && isfinite(race.best[0]) && isinf(race.best[3]));
  sluice_gemm_race_start(&race, 0); /* all have declined */
  assert_true(sluice_gemm_race_is_over(&race));
  assert_int_equal(sluice_gemm_race_next(&race, FLOP), -1);
}

TEST(Race_LongRuns_EndAfterThreeRounds_ShortOnesAfterEight) {
  for (int is_long = 0; is_long < 2; ++is_long) {
    sluice_gemm_race_t race = {0};
    sluice_gemm_race_earn(&race, 1000, 1000 * FLOP);
    sluice_gemm_race_start(&race, 0x3);
    int runs = 0;
    for (int kind; (kind = sluice_gemm_race_next(&race, FLOP)) >= 0; ++runs) {
      sluice_gemm_race_ran(&race, kind, is_long ? 0.1 : 1e-5, FLOP);
    }
    assert_int_equal(runs, is_long ? 2 * 4 : 2 * 9);
  }
}
