// SPDX-License-Identifier: Apache-2.0
/* Whole passes on simulated machines: predictions for layers after the correction. */
#include <math.h>

#include "backend/calibrate/passes_fit.h"
#include "third_party/bazel/test.h"

static const sluice_workload_t small = {.model_width = 256,
                                        .hidden_width = 512,
                                        .num_experts = 4,
                                        .top_k = 1,
                                        .gate_factor = 1,
                                        .dtype = SLUICE_DTYPE_F32,
                                        .world_size = 2,
                                        .num_tokens = 1,
                                        .skew = 1};

static sluice_machine_t true_machine(void) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.world_size = 2;
  m.gemm[SLUICE_MACHINE_F32][0] = (sluice_curve_t){2, {1, 64}, {4e-10, 3e-11}};
  m.rows = (sluice_curve_t){1, {1}, {2e-10}};
  m.exchange.startup_seconds = 5e-5;
  m.exchange.bytes = (sluice_curve_t){1, {1}, {1e-9}};
  m.exchange_contention = (sluice_curve_t){2, {1024, 1 << 20}, {4e-4, 4e-4}};
  m.compute_contention = (sluice_curve_t){2, {1024, 1 << 20}, {1e-4, 2e-4}};
  m.op_seconds = 1.2e-4, m.pass_seconds = 7e-4;
  return m;
}

typedef struct world_s {
  sluice_machine_t machine;
  sluice_workload_t work;
  int32_t num_samples, most_chunks;
  sluice_status_t fails;
} world_t;

/* One sample in six is disturbed, in irregular order. */
static int is_disturbed(int32_t sample) { return ((uint32_t)sample * 2654435761u >> 16) % 6 == 0; }

static sluice_status_t sample(void* user, int64_t num_tokens, int32_t num_chunks, double out_seconds[2],
                              double out_compute[2]) {
  world_t* w = user;
  const sluice_choice_t choice = {.num_chunks = num_chunks};
  w->work.num_tokens = num_tokens;
  sluice_machine_t bare = w->machine; /* the start of an op does not count for its lane */
  bare.op_seconds = 0;
  for (int32_t d = 0; d < 2; ++d) {
    sluice_prediction_t p = {0}, lanes = {0};
    assert_int_equal(sluice_predict_pass_lanes(&w->machine, &w->work, &choice, d, &p), SLUICE_OK);
    assert_int_equal(sluice_predict_pass_lanes(&bare, &w->work, &choice, d, &lanes), SLUICE_OK);
    const double more = is_disturbed(w->num_samples) ? 3 : 1;
    out_seconds[d] = p.total * more, out_compute[d] = lanes.busy[SLUICE_LANE_COMPUTE] * more;
  }
  ++w->num_samples;
  if (num_chunks > w->most_chunks) w->most_chunks = num_chunks;
  return w->fails;
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  (void)user, (void)seconds, (void)count;
  return SLUICE_OK;
}

static sluice_machine_t fitted(world_t* w, sluice_machine_t measured, double seconds) {
  const sluice_passes_source_t source = {sample, longest, w, w->work};
  assert_int_equal(sluice_passes_fit(&source, seconds, &measured), SLUICE_OK);
  return measured;
}

/* The largest relative error for layers of other sizes, at every n. */
static double worst_error(const sluice_machine_t* machine, const sluice_machine_t* truth) {
  double worst = 0;
  for (int64_t tokens = 64; tokens <= 4096; tokens *= 8) {
    sluice_workload_t w = small;
    w.num_tokens = tokens, w.num_experts = 8, w.top_k = 2;
    for (int32_t n = 1; n <= 12; n += 3) {
      const sluice_choice_t choice = {.num_chunks = n};
      sluice_step_prediction_t got, want;
      assert_int_equal(sluice_predict_step(machine, &w, &choice, &got), SLUICE_OK);
      assert_int_equal(sluice_predict_step(truth, &w, &choice, &want), SLUICE_OK);
      for (int32_t d = 0; d < 2; ++d) worst = fmax(worst, fabs(got.seconds[d] / want.seconds[d] - 1));
    }
  }
  return worst;
}

TEST(Fit_OpsTakeMoreOrLessThanJobs_PredictsOtherLayers) {
  static const struct {
    double op_seconds, pass_seconds, error; /* as measured, and the error that this makes */
  } cases[] = {{2e-6, 0, 0.3}, {4e-4, 7e-4, 0.1}};
  for (int i = 0; i < 2; ++i) {
    world_t w = {.machine = true_machine(), .work = small};
    sluice_machine_t measured = w.machine;
    measured.op_seconds = cases[i].op_seconds, measured.pass_seconds = cases[i].pass_seconds;
    assert_true(worst_error(&measured, &w.machine) > cases[i].error);
    const sluice_machine_t m = fitted(&w, measured, 10);
    assert_true(worst_error(&m, &w.machine) < 0.01 && w.most_chunks == 8);
  }
}

/* GEMMs on one cached matrix are faster than those of a layer, especially with few rows; the directions differ. */
TEST(Fit_GemmsFromColdMemory_PredictsOtherLayers) {
  world_t w = {.machine = true_machine(), .work = small};
  sluice_curve_t* forms = w.machine.gemm[SLUICE_MACHINE_F32];
  for (int32_t form = 0; form < SLUICE_FORM_COUNT; ++form) {
    forms[form] = (sluice_curve_t){4, {1, 16, 256, 1024}, {4e-10, 6e-11, 3e-11, 2.9e-11}};
  }
  sluice_machine_t measured = w.machine;
  measured.pass_seconds = 0;
  for (int32_t form = 0; form < SLUICE_FORM_COUNT; ++form) {
    for (int32_t i = 0; i < 4; ++i) measured.gemm[SLUICE_MACHINE_F32][form].y[i] *= form == 0 ? 0.75 : 0.8;
    for (int32_t i = 0; i < 2; ++i) measured.gemm[SLUICE_MACHINE_F32][form].y[i] *= 0.7;
  }
  assert_true(worst_error(&measured, &w.machine) > 0.15);
  sluice_machine_t m = fitted(&w, measured, 100);
  assert_true(worst_error(&m, &w.machine) < 0.05);
}

/* Rows that exceed the cache: GEMMs of few rows, and of many, are predicted correctly. */
TEST(Fit_RowsBeyondCaches_PredictsOtherLayers) {
  world_t w = {.machine = true_machine(), .work = small};
  const double row = (256 + 512) * sizeof(float);
  for (int32_t d = 0; d < 2; ++d) {
    const double factor = d == 0 ? 1.2 : 1.3;
    w.machine.cache_miss_factor[d] = (sluice_curve_t){3, {512 * row, 2048 * row, 4096 * row}, {1, factor, factor}};
  }
  sluice_machine_t measured = w.machine;
  measured.cache_miss_factor[0].count = measured.cache_miss_factor[1].count = 0;
  assert_true(worst_error(&measured, &w.machine) > 0.1);
  sluice_machine_t m = fitted(&w, measured, 100);
  assert_true(worst_error(&m, &w.machine) < 0.01);
}

/* Exchanges measured during GEMMs on a cached matrix have other contention than those of a pass. */
TEST(Fit_ExchangesDuringGemms_AreCorrected) {
  static const double factors[][2] = {{4, 1}, {1, 4}, {2, 0.5}};
  for (size_t i = 0; i < sizeof factors / sizeof *factors; ++i) {
    world_t w = {.machine = true_machine(), .work = small};
    w.machine.op_seconds = 2e-5;
    w.machine.exchange.bytes.y[0] = 1e-8; /* exchanges take about as long as GEMMs */
    sluice_machine_t measured = w.machine;
    for (int32_t k = 0; k < 2; ++k) {
      w.machine.exchange_contention.y[k] *= factors[i][0], w.machine.compute_contention.y[k] *= factors[i][1];
    }
    sluice_machine_t m = fitted(&w, measured, 100);
    double exchange = m.exchange_contention.y[0] / w.machine.exchange_contention.y[0];
    double compute = m.compute_contention.y[0] / w.machine.compute_contention.y[0];
    assert_true(exchange > 0.7 && exchange < 1.4 && compute > 0.7 && compute < 1.4);
  }
}

TEST(Fit_RightMachine_StaysAsItIs) {
  world_t w = {.machine = true_machine(), .work = small};
  sluice_machine_t m = fitted(&w, w.machine, 10);
  assert_true(fabs(m.op_seconds - w.machine.op_seconds) < 1e-8 && fabs(m.pass_seconds - 7e-4) < 1e-6);
}

TEST(Fit_OneRank_RunsOneChunkAlone) {
  world_t w = {.machine = true_machine(), .work = small};
  w.work.world_size = 1;
  sluice_machine_t measured = w.machine;
  measured.pass_seconds = 0;
  sluice_machine_t m = fitted(&w, measured, 10);
  assert_true(w.most_chunks == 1 && fabs(m.pass_seconds - 7e-4) < 1e-9 && m.op_seconds == measured.op_seconds);
}

TEST(Fit_LittleTime_LeavesOutManyChunks) {
  world_t w = {.machine = true_machine(), .work = small};
  sluice_machine_t measured = w.machine;
  measured.op_seconds = 2e-6, measured.pass_seconds = 0;
  sluice_machine_t m = fitted(&w, measured, 1e-3);
  assert_true(w.num_samples <= 2 * 3 + 3 * 2 && worst_error(&m, &w.machine) < 0.1);
}

TEST(Fit_FailingPass_PassesItOn) {
  world_t w = {.machine = true_machine(), .work = small, .fails = SLUICE_E_PEER_LOST};
  sluice_machine_t m = w.machine;
  const sluice_passes_source_t source = {sample, longest, &w, w.work};
  assert_int_equal(sluice_passes_fit(&source, 1, &m), SLUICE_E_PEER_LOST);
}
