// SPDX-License-Identifier: Apache-2.0
/* The sim device over real templates, compared with the closed forms. */
#include <math.h>

#include "backend/cost/closed_forms.h"
#include "backend/cost/predict.h"
#include "backend/schedule/template/template.h"
#include "third_party/bazel/test.h"

typedef struct costs_s {
  sluice_chunk_times_t times;
} costs_t;

/* All computation of a chunk in one op; packing and the rest cost nothing. */
static double op_cost(void* user, const sluice_op_t* op) {
  const sluice_chunk_times_t* t = &((const costs_t*)user)->times;
  switch (op->kind) {
    case SLUICE_OP_DISPATCH:
    case SLUICE_OP_DISPATCH_GRAD: return t->dispatch;
    case SLUICE_OP_GEMM1:
    case SLUICE_OP_ACTIVATION_GRAD: return t->compute; /* the first that reads T_DI, or T_M */
    case SLUICE_OP_COMBINE:
    case SLUICE_OP_COMBINE_GRAD: return t->combine;
    case SLUICE_OP_COPY_OUT:
    case SLUICE_OP_COPY_IN: return t->copy;
    default: return 0;
  }
}

static double simulate(sluice_template_spec_t spec, sluice_chunk_times_t times, sluice_prediction_t* out) {
  costs_t costs = {times};
  sluice_template_t* t = NULL;
  sluice_prediction_t prediction;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_OK);
  const sluice_op_costs_t given = {.seconds = op_cost, .user = &costs};
  assert_int_equal(sluice_predict(t, &given, sluice_process_allocator(), &prediction, NULL, NULL), SLUICE_OK);
  sluice_template_destroy(t, sluice_process_allocator());
  if (out != NULL) *out = prediction;
  return prediction.total;
}

static sluice_template_spec_t forward(int32_t n, int32_t di, int32_t m) {
  sluice_template_spec_t spec = {.num_chunks = n, .keep = 1};
  for (int32_t i = 0; i < n; ++i) spec.restore_input[i] = (uint8_t)di, spec.restore_pre_activation[i] = (uint8_t)m;
  return spec;
}

static uint32_t next_random(uint32_t* state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

/* Integers, so that sums are exact in any order. */
static sluice_chunk_times_t random_times(uint32_t* seed, int with_copy) {
  sluice_chunk_times_t t = {1 + next_random(seed) % 50, 1 + next_random(seed) % 50, 1 + next_random(seed) % 50, 0};
  if (with_copy) t.copy = 1 + next_random(seed) % 50;
  return t;
}

TEST(Paradigm1_EveryN_EqualsTheClosedFormExactly) {
  const sluice_alphas_t alone = sluice_no_interference();
  uint32_t seed = 1;
  int64_t compared = 0;
  for (int32_t n = 1; n <= 32; ++n) {
    for (int i = 0; i < 100; ++i, ++compared) {
      sluice_chunk_times_t t = random_times(&seed, 0);
      double want = sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, n, t, &alone);
      double got = simulate(forward(n, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE), t, NULL);
      if (got != want) {
        fail_msg("n %d S %g C %g R %g: simulated %g, closed form %g", n, t.dispatch, t.compute, t.combine, got, want);
      }
    }
  }
  printf("paradigm 1: %lld of %lld equal\n", (long long)compared, (long long)compared);
}

/* With everything kept, all dispatches run ahead: S1 .. Sn, then R1 .. Rn. The exact recurrence. */
static double dispatch_ahead(int32_t n, sluice_chunk_times_t t) {
  double compute_free = 0, comm_free = n * t.dispatch;
  for (int32_t i = 0; i < n; ++i) {
    double arrived = (i + 1) * t.dispatch;
    compute_free = (arrived > compute_free ? arrived : compute_free) + t.compute;
    comm_free = (compute_free > comm_free ? compute_free : comm_free) + t.combine;
  }
  return comm_free;
}

TEST(EverythingKept_EqualsItsRecurrenceAndIsNeverSlower) {
  const sluice_alphas_t alone = sluice_no_interference();
  uint32_t seed = 2;
  int64_t faster = 0;
  for (int32_t n = 1; n <= 32; ++n) {
    for (int i = 0; i < 50; ++i) {
      sluice_chunk_times_t t = random_times(&seed, 0);
      double got = simulate(forward(n, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP), t, NULL);
      double alternating = sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, n, t, &alone);
      assert_true(got == dispatch_ahead(n, t));
      assert_true(got <= alternating);
      faster += got < alternating;
    }
  }
  printf("dispatching all ahead against alternating: faster in %lld of 1600, never slower\n", (long long)faster);
  assert_true(faster > 0);
}

/* Under a plan slots do not grow with n: two of T_DO, and dispatches alternate with combines. */
TEST(EverythingKeptUnderAPlan_EqualsTheClosedForm) {
  const sluice_alphas_t alone = sluice_no_interference();
  uint32_t seed = 4;
  for (int32_t n = 1; n <= 32; ++n) {
    for (int i = 0; i < 50; ++i) {
      sluice_chunk_times_t t = random_times(&seed, 0);
      sluice_template_spec_t spec = forward(n, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP);
      spec.bounded = 1;
      assert_true(simulate(spec, t, NULL) == sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, n, t, &alone));
    }
  }
}

/* Closed form over simulated time. */
typedef struct misses_s {
  double worst, sum;
  int64_t count, under;
} misses_t;

static void note_miss(misses_t* e, double form, double simulated) {
  const double error = form / simulated - 1;
  ++e->count, e->sum += error, e->under += error < -1e-12;
  if (error > e->worst) e->worst = error;
}

static void print_misses(const char* what, const misses_t* e) {
  printf("%s: mean error %.2f %%, worst %.1f %%, below the simulated time in %lld of %lld\n", what,
         100 * e->sum / (double)e->count, 100 * e->worst, (long long)e->under, (long long)e->count);
}

TEST(Paradigm2_NeverTakesLessThanSimulated) {
  const sluice_alphas_t alone = sluice_no_interference();
  uint32_t seed = 3;
  misses_t error = {0};
  for (int32_t n = 2; n <= 16; ++n) {
    for (int i = 0; i < 200; ++i) {
      sluice_chunk_times_t t = random_times(&seed, 1);
      double got = simulate(forward(n, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_OFFLOAD), t, NULL);
      note_miss(&error, sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_AFTER, n, t, &alone), got);
    }
  }
  print_misses("paradigm 2 (S2 forward)", &error);
  assert_true(error.under == 0 && error.sum / (double)error.count < 0.02);
}

/* Computation of a chunk waits for its copy-in, as the activation gradient does for T_M. */
TEST(Paradigm3_NeverTakesLessThanSimulated) {
  const sluice_alphas_t alone = sluice_no_interference();
  uint32_t seed = 5;
  misses_t error = {0};
  for (int32_t n = 2; n <= 16; ++n) {
    sluice_template_spec_t spec = {.direction = SLUICE_BACKWARD,
                                   .num_chunks = n,
                                   .dgrad = 1,
                                   .wgrad = SLUICE_WGRAD_CALL_NONE,
                                   .reuse_saved = 1,
                                   .bounded = 1};
    for (int32_t i = 0; i < n; ++i) spec.restore_pre_activation[i] = SLUICE_RESTORE_OFFLOAD;
    for (int i = 0; i < 200; ++i) {
      sluice_chunk_times_t t = random_times(&seed, 1);
      note_miss(&error, sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_BEFORE, n, t, &alone), simulate(spec, t, NULL));
    }
  }
  print_misses("paradigm 3 (T_M offloaded, backward)", &error);
  assert_true(error.under == 0 && error.sum / (double)error.count < 0.02);
}

TEST(Interference_StretchesWhatRunsTogether) {
  /* Two lanes at half speed while both run: 10 and 4 seconds of work take 4/0.5 = 8 together, then 6 alone. */
  sluice_template_spec_t spec = forward(2, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP);
  double share[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES];
  memset(share, 0, sizeof share);
  unsigned both = 1u << SLUICE_LANE_COMPUTE | 1u << SLUICE_LANE_COMM;
  share[SLUICE_LANE_COMPUTE][both] = share[SLUICE_LANE_COMM][both] = 0.5;
  costs_t costs = {{4, 10, 0, 0}};
  sluice_template_t* t = NULL;
  sluice_prediction_t p;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_OK);
  const sluice_op_costs_t given = {
      .seconds = op_cost, .user = &costs, .share = (const double(*)[1 << SLUICE_NUM_LANES]) share};
  assert_int_equal(sluice_predict(t, &given, sluice_process_allocator(), &p, NULL, NULL), SLUICE_OK);
  assert_true(p.total == 4 + 8 + 6 + 10); /* S1; S2 during the first part of C1; the rest of C1; C2 */
  share[SLUICE_LANE_COMM][both] = 1.5;
  assert_int_equal(sluice_predict(t, &given, sluice_process_allocator(), &p, NULL, NULL), SLUICE_E_INVALID_ARGUMENT);
  sluice_template_destroy(t, sluice_process_allocator());
}

static int is_near(double a, double b) { return fabs(a - b) <= 1e-12 * (1 + fabs(b)); }

/* Every phase with the factors of the streams that run in it, computed by hand. */
TEST(ClosedForms_WithInterference_HaveTheirValues) {
  const sluice_chunk_times_t t = {2, 3, 5, 7}, no_copies = {2, 3, 5, 0};
  const sluice_alphas_t a = {{{1, 0.5, 0.25, 0.2}, {0.8, 1, 1, 0.6}, {0.7, 0.9, 1, 0.5}}};
  const sluice_alphas_t alone = sluice_no_interference();
  /* S; S with C: 4; twice S + R with C: 14; R with C: 10; R */
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, 4, no_copies, &a), 2 + 4 + 2 * 14 + 10 + 5));
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, 4, no_copies, &alone), 2 + 3 + 2 * 7 + 5 + 5));
  /* S; S with C: 4; twice all: (S + R) / 0.2; all: R / 0.2; R with X: 20 */
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_AFTER, 4, t, &a), 2 + 4 + 2 * 35 + 25 + 20));
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_AFTER, 4, t, &alone), 2 + 3 + 2 * 7 + 7 + 7));
  /* S with X: X / 0.7; all: X / 0.5; twice all; R with C: 10; R */
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_BEFORE, 4, t, &a), 10 + 14 + 2 * 35 + 10 + 5));
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_BEFORE, 4, t, &alone), 7 + 7 + 2 * 7 + 5 + 5));
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, 1, no_copies, &a), 2 + 3 + 5));
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_AFTER, 1, t, &a), 2 + 3 + 20));
  assert_true(is_near(sluice_mpmoe_pass(SLUICE_PARADIGM_COPY_BEFORE, 1, t, &a), 10 + 3 + 5));
  /* eq. 10: mu_all, sigma_all, eta_all with copies; mu_comp and sigma_comm without */
  assert_true(is_near(sluice_mpipemoe_pass(4, t, &a), 4 * 35.0));
  assert_true(is_near(sluice_mpipemoe_pass(4, no_copies, &a), 4 * 14.0));
  assert_true(is_near(sluice_mpipemoe_pass(4, (sluice_chunk_times_t){1, 30, 1, 2}, &a), 4 * 50.0));
  assert_true(is_near(sluice_mpipemoe_pass(4, (sluice_chunk_times_t){1, 3, 1, 30}, &a), 4 * 60.0));
}
