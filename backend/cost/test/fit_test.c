// SPDX-License-Identifier: Apache-2.0
/* What is fitted to measurements: medians, quantiles and curves; predictions from a pass of one chunk for more chunks,
 * on a machine without interference; wrong machines, corrected by the passes of a simulated one. */
#include <math.h>

#include "backend/cost/bootstrap_model.h"
#include "backend/cost/cost.h"
#include "backend/cost/fit.h"
#include "backend/cost/refined_machine.h"
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

/* ---- simulated passes ---- */

static sluice_machine_t machine_of(double gemm_flop, double startup, double byte, double pass_seconds) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.world_size = 2, m.exchange.startup_seconds = startup, m.pass_seconds = pass_seconds;
  m.gemm[SLUICE_MACHINE_F32][0] = (sluice_curve_t){1, {1}, {gemm_flop}};
  m.exchange.bytes = (sluice_curve_t){1, {1}, {byte}};
  return m;
}

static const sluice_workload_t small = {.model_width = 64,
                                        .hidden_width = 128,
                                        .num_experts = 4,
                                        .top_k = 2,
                                        .gate_factor = 1,
                                        .dtype = SLUICE_DTYPE_F32,
                                        .world_size = 2,
                                        .skew = 1};

static sluice_prediction_t predict(const sluice_machine_t* m, const sluice_workload_t* work, int32_t n,
                                   int32_t direction) {
  const sluice_choice_t choice = {.num_chunks = n};
  sluice_prediction_t p = {0};
  assert_int_equal(sluice_predict_pass_lanes(m, work, &choice, direction, &p), SLUICE_OK);
  return p;
}

/* From links that never delay computation to links that dominate, both directions, every n. */
TEST(BootstrapModel_OfOneChunk_IsWhatTheScheduleTakes) {
  sluice_workload_t work = small;
  work.model_width = 512, work.hidden_width = 2048, work.num_experts = 2, work.top_k = 1, work.num_tokens = 8192;
  for (double comm = 0.125; comm <= 8; comm *= 2) { /* time of exchanges over that of GEMMs, two per row */
    const sluice_machine_t m = machine_of(1e-11, 0, 1e-11 * 2 * 2048 * comm, 0);
    for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
      const sluice_prediction_t one = predict(&m, &work, 1, d);
      const sluice_lanes_t lanes = {one.busy[SLUICE_LANE_COMPUTE], one.busy[SLUICE_LANE_COMM], 0, 1e-6};
      const sluice_bootstrap_point_t point = {1, one.total, lanes};
      const sluice_bootstrap_work_t wanted = {8192, 1e-6, 0};
      for (int32_t n = 1; n <= 16; n += n < 4 ? 1 : 4) {
        double said = sluice_bootstrap_pass(&point, 1, d, &wanted, n), takes = predict(&m, &work, n, d).total;
        if (fabs(said / takes - 1) > 0.06) printf("comm %g, direction %d, n %d: %g of %g s\n", comm, d, n, said, takes);
        assert_true(fabs(said / takes - 1) <= 0.06);
      }
    }
  }
}

/* Passes of the true machine, of several sizes and n; every fifth takes longer by `noise`. */
static void run(sluice_timed_passes_t* f, const sluice_machine_t* truth, int32_t count, double noise) {
  for (int32_t i = 0; i < count; ++i) {
    sluice_timed_pass_t p = {.work = small, .num_chunks = 1 + i % 3, .direction = i % 2};
    p.work.num_tokens = 64 << i % 4;
    const sluice_prediction_t took = predict(truth, &p.work, p.num_chunks, p.direction);
    double more = i % 5 == 0 ? noise : 1;
    p.seconds = took.total * more, p.compute = took.busy[SLUICE_LANE_COMPUTE] * more;
    p.comm = took.busy[SLUICE_LANE_COMM] * more;
    sluice_timed_passes_add(f, &p);
  }
}

TEST(Refine_WrongRates_AreThoseOfThePasses) {
  static sluice_timed_passes_t f;
  const sluice_machine_t truth = machine_of(1.7e-10, 4e-5, 4e-10, 3e-4), said = machine_of(1e-10, 1e-4, 1e-9, 0);
  run(&f, &truth, 40, 2.5);
  sluice_machine_t m;
  assert_int_equal(sluice_machine_refine(&f, &said, &m), SLUICE_OK);
  assert_true(m.provenance == SLUICE_MACHINE_REFINED && m.error_count == 13);
  assert_true(fabs(m.gemm[SLUICE_MACHINE_F32][0].y[0] / 1.7e-10 - 1) < 1e-9);
  assert_true(fabs(m.exchange.startup_seconds / 4e-5 - 1) < 1e-9 && fabs(m.pass_seconds - 3e-4) < 1e-9);
  assert_true(m.error_median < 1e-9 && m.error_p90 > 0.1); /* the disturbed passes that were held out */
  /* The passes of a changed machine replace the old ones. */
  const sluice_machine_t later = machine_of(0.6e-10, 4e-5, 4e-10, 3e-4);
  run(&f, &later, SLUICE_TIMED_PASSES, 1);
  assert_int_equal(sluice_machine_refine(&f, &said, &m), SLUICE_OK);
  assert_true(fabs(m.gemm[SLUICE_MACHINE_F32][0].y[0] / 0.6e-10 - 1) < 1e-9 && m.error_p90 < 1e-9);
}

TEST(Refine_TooFewPasses_IsRefused) {
  sluice_timed_passes_t f = {0};
  const sluice_machine_t truth = machine_of(1e-10, 1e-4, 1e-9, 0);
  sluice_machine_t m;
  run(&f, &truth, SLUICE_TIMED_PASSES_LEAST - 1, 1);
  assert_int_equal(sluice_machine_refine(&f, &truth, &m), SLUICE_E_STATE);
}
