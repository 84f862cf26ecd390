// SPDX-License-Identifier: Apache-2.0
/* Wrong machines, corrected by the passes of a simulated one. */
#include <math.h>

#include "backend/cost/refined_machine.h"
#include "third_party/bazel/test.h"

static sluice_machine_t machine_of(double compute, double comm, double pass_seconds) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.world_size = 2;
  m.gemm[SLUICE_MACHINE_F32][0] = (sluice_curve_t){1, {1}, {compute * 1e-10}};
  m.exchange.startup_seconds = comm * 1e-4;
  m.exchange.bytes = (sluice_curve_t){1, {1}, {comm * 1e-9}};
  m.pass_seconds = pass_seconds;
  return m;
}

static sluice_workload_t work_of(int64_t tokens) {
  return (sluice_workload_t){.model_width = 64,
                             .hidden_width = 128,
                             .num_experts = 4,
                             .top_k = 2,
                             .gate_factor = 1,
                             .dtype = SLUICE_DTYPE_F32,
                             .world_size = 2,
                             .num_tokens = tokens,
                             .skew = 1};
}

/* Passes of the true machine, of several sizes and n; every fifth takes longer by `noise`. */
static void run(sluice_timed_passes_t* f, const sluice_machine_t* truth, int32_t count, double noise) {
  for (int32_t i = 0; i < count; ++i) {
    sluice_timed_pass_t p = {.work = work_of(64 << i % 4), .num_chunks = 1 + i % 3, .direction = i % 2};
    const sluice_choice_t choice = {.num_chunks = p.num_chunks};
    sluice_prediction_t took = {0};
    assert_int_equal(sluice_predict_pass_lanes(truth, &p.work, &choice, p.direction, &took), SLUICE_OK);
    double more = i % 5 == 0 ? noise : 1;
    p.seconds = took.total * more, p.compute = took.busy[SLUICE_LANE_COMPUTE] * more;
    p.comm = took.busy[SLUICE_LANE_COMM] * more;
    sluice_timed_passes_add(f, &p);
  }
}

TEST(Refine_WrongRates_AreThoseOfThePasses) {
  static sluice_timed_passes_t f;
  const sluice_machine_t truth = machine_of(1.7, 0.4, 3e-4), said = machine_of(1, 1, 0);
  run(&f, &truth, 40, 2.5);
  sluice_machine_t m;
  assert_int_equal(sluice_machine_refine(&f, &said, &m), SLUICE_OK);
  assert_true(m.provenance == SLUICE_MACHINE_REFINED && m.error_count == 13);
  assert_true(fabs(m.gemm[SLUICE_MACHINE_F32][0].y[0] / 1.7e-10 - 1) < 1e-9);
  assert_true(fabs(m.exchange.startup_seconds / 4e-5 - 1) < 1e-9 && fabs(m.pass_seconds - 3e-4) < 1e-9);
  assert_true(m.error_median < 1e-9 && m.error_p90 > 0.1); /* the disturbed passes that were held out */
  /* The passes of a changed machine replace the old ones. */
  const sluice_machine_t later = machine_of(0.6, 0.4, 3e-4);
  run(&f, &later, SLUICE_TIMED_PASSES, 1);
  assert_int_equal(sluice_machine_refine(&f, &said, &m), SLUICE_OK);
  assert_true(fabs(m.gemm[SLUICE_MACHINE_F32][0].y[0] / 0.6e-10 - 1) < 1e-9 && m.error_p90 < 1e-9);
}

TEST(Refine_TooFewPasses_IsRefused) {
  sluice_timed_passes_t f = {0};
  const sluice_machine_t truth = machine_of(1, 1, 0);
  sluice_machine_t m;
  run(&f, &truth, SLUICE_TIMED_PASSES_LEAST - 1, 1);
  assert_int_equal(sluice_machine_refine(&f, &truth, &m), SLUICE_E_STATE);
}
