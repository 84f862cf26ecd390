// SPDX-License-Identifier: Apache-2.0
/* Contention of exchanges and GEMMs: recovered from noisy simulated machines, and its effect on a schedule of small
 * exchanges. */
#include <math.h>

#include "backend/calibrate/contention.h"
#include "backend/cost/cost.h"
#include "sluice/context.h"
#include "third_party/bazel/test.h"

/* ---- a simulated machine ---- */

/* An exchange takes 0.2 ms and 10 ns a byte. During GEMMs it takes 2 ms more up to 64 KiB, falling to 1 ms at 1 MiB,
 * since a long exchange hides the waits of its messages. The GEMMs lose 0.05 ms and 1 ns a byte. A second exchange adds
 * 0.1 ms, and 1.5 ms during GEMMs. */
static double true_alone(double bytes) { return 2e-4 + 1e-8 * bytes; }
static double true_exchange_contention(double bytes) {
  double octaves = log2(fmax(65536, fmin(bytes, 1 << 20)) / 65536) / 4;
  return 2e-3 - 1e-3 * octaves;
}
static double true_compute_contention(double bytes) { return 5e-5 + 1e-9 * bytes; }

typedef struct made_up_s {
  uint32_t random;
  double noise;       /* relative, of every time, up or down */
  double flips;       /* share of samples during which the machine takes 1.5 times as long */
  double disturbed;   /* share of samples during GEMMs that take ten times as long */
  double rank_factor; /* the slowest rank's times over this rank's */
  int32_t num_samples;
  double seconds; /* total duration */
  int64_t longest_bytes;
} made_up_t;

static double uniform(made_up_t* m) {
  m->random = m->random * 1664525u + 1013904223u;
  return (double)(m->random >> 8) / (double)(1 << 24);
}

static double noisy(made_up_t* m, double seconds) { return seconds * (1 + m->noise * (2 * uniform(m) - 1)); }

static sluice_status_t sample(void* user, int64_t bytes, int32_t num_second, double seconds,
                              sluice_contention_sample_t* out) {
  made_up_t* m = user;
  ++m->num_samples;
  double alone = true_alone((double)bytes) + num_second * 1e-4,
         later = true_exchange_contention((double)bytes) + num_second * 1.5e-3;
  double flip = 1 + 0.5 * (uniform(m) < m->flips);
  out->alone = noisy(m, alone * flip);
  out->busy = noisy(m, (alone + later) * flip);
  out->lost = noisy(m, true_compute_contention((double)bytes) + num_second * 2e-5) * flip;
  if (uniform(m) < m->disturbed) out->busy *= 10, out->lost = -out->lost;
  m->seconds += fmax(seconds, out->alone + out->busy);
  if (bytes > m->longest_bytes) m->longest_bytes = bytes;
  return SLUICE_OK;
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  const made_up_t* m = user;
  for (int32_t i = 0; i < count; ++i) seconds[i] *= m->rank_factor;
  return SLUICE_OK;
}

static sluice_machine_t machine(void) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.world_size = 2;
  m.exchange.startup_seconds = 2e-4;
  m.exchange.bytes = (sluice_curve_t){1, {1e6}, {1e-2}};
  m.gemm[SLUICE_MACHINE_F32][0] = (sluice_curve_t){1, {1}, {1e-11}};
  return m;
}

static double relative(double got, double want) { return fabs(got / want - 1); }

/* ---- measuring ---- */

TEST(Contention_NoisyMachine_IsRecoveredAtEverySize) {
  double worst = 0, sum = 0;
  int32_t count = 0, device_off = 0, second_off = 0;
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    made_up_t from = {.random = seed * 7919, .noise = 0.03, .flips = 0.1, .disturbed = 0.1, .rank_factor = 1};
    const sluice_contention_source_t source = {sample, longest, &from};
    sluice_machine_t m = machine();
    assert_int_equal(sluice_contention_measure(&source, 1.6, &m), SLUICE_OK);
    assert_int_equal(sluice_machine_check(&m), SLUICE_OK);
    for (double bytes = 256; bytes <= 1 << 20; bytes *= 2) {
      double alone = sluice_machine_exchange(&m, 2, bytes);
      double error = relative(alone + sluice_machine_contention(&m, bytes, alone).exchange,
                              true_alone(bytes) + true_exchange_contention(bytes));
      sum += error, ++count, device_off += error > 0.2;
      if (error > worst) worst = error;
    }
    second_off += relative(m.second_exchange_contention, 1.5e-3) > 0.3 || fabs(m.second_exchange_seconds - 1e-4) > 5e-5;
  }
  printf("an exchange during GEMMs: mean error %.1f %%, worst %.1f %%, above 20 %% in %d of %d\n", 100 * sum / count,
         100 * worst, device_off, count);
  printf("of a second exchange: more than 30 %% off on %d of 200 machines\n", second_off);
  assert_true(sum / count < 0.05 && device_off < count / 50 && second_off < 200 / 10);
}

TEST(Contention_QuietMachine_IsExact) {
  made_up_t from = {.random = 5, .rank_factor = 1};
  const sluice_contention_source_t source = {sample, longest, &from};
  sluice_machine_t m = machine();
  assert_int_equal(sluice_contention_measure(&source, 1.6, &m), SLUICE_OK);
  const double sizes[] = {1 << 10, 1 << 13, 1 << 15, 1 << 17, 1 << 19};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
    sluice_contention_t contention = sluice_machine_contention(&m, sizes[i], true_alone(sizes[i]));
    assert_true(relative(contention.exchange, true_exchange_contention(sizes[i])) < 1e-9);
    assert_true(relative(contention.compute, true_compute_contention(sizes[i])) < 1e-9);
  }
  assert_true(relative(m.second_exchange_seconds, 1e-4) < 1e-6 &&
              relative(m.second_exchange_contention, 1.5e-3) < 1e-6 &&
              relative(m.second_compute_contention, 2e-5) < 1e-6);
}

TEST(Contention_SlowLink_LeavesLargeSizesOutAndStaysInItsTime) {
  made_up_t from = {.random = 5, .noise = 0.02, .rank_factor = 1};
  const sluice_contention_source_t source = {sample, longest, &from};
  sluice_machine_t m = machine();
  assert_int_equal(sluice_contention_measure(&source, 0.2, &m), SLUICE_OK); /* 5.7 ms a sample: 1 MiB takes 10 */
  assert_int_equal(from.longest_bytes, 1 << 19);
  assert_true(from.seconds < 2 * 0.2);
  assert_int_equal(m.exchange_contention.count, 5);
}

TEST(Contention_OtherRanksSlower_TheirTimesCount) {
  made_up_t from = {.random = 5, .rank_factor = 1}, slower = {.random = 5, .rank_factor = 1.5};
  const sluice_contention_source_t here = {sample, longest, &from}, there = {sample, longest, &slower};
  sluice_machine_t a = machine(), b = machine();
  assert_int_equal(sluice_contention_measure(&here, 1.6, &a), SLUICE_OK);
  assert_int_equal(sluice_contention_measure(&there, 1.6, &b), SLUICE_OK);
  assert_true(relative(b.exchange_contention.y[0], 1.5 * a.exchange_contention.y[0]) < 1e-9);
}

static const sluice_workload_t small_work = {.model_width = 64,
                                             .hidden_width = 64,
                                             .num_experts = 2,
                                             .top_k = 1,
                                             .gate_factor = 1,
                                             .dtype = SLUICE_DTYPE_F32,
                                             .world_size = 2,
                                             .num_tokens = 64,
                                             .skew = 1};

/* ---- predicting ---- */

/* A forward of two chunks on a machine where packing, unpacking and summing are free, computed by hand. An exchange of
 * a chunk takes a alone and b during GEMMs, which lose t; GEMMs take c per chunk. S2 runs during C1, R1 during C2, S1
 * and R2 alone. */
TEST(Forward_SmallExchangesDuringGemms_IsTheSumByHand) {
  sluice_machine_t m = machine();
  m.exchange_contention = (sluice_curve_t){2, {1e3, 1e6}, {2e-3, 2e-3}};
  m.compute_contention = (sluice_curve_t){2, {1e3, 1e6}, {1e-4, 1e-4}};
  const double a = true_alone(32 * 64 * 4 / 2.0), b = a + 2e-3, t = 1e-4;
  for (int64_t hidden = 64; hidden <= 1 << 20; hidden *= 2) {
    sluice_workload_t w = small_work;
    w.hidden_width = hidden, w.chunking = SLUICE_CHUNKING_TOKENS;
    const sluice_choice_t two = {.num_chunks = 2};
    double got = 0, c = 2 * 2.0 * 32 * 64 * (double)hidden * 1e-11;
    assert_int_equal(sluice_predict_pass(&m, &w, &two, SLUICE_FORWARD, &got), SLUICE_OK);
    got -= sluice_pass_overhead(&m, &w, SLUICE_FORWARD);
    double own = a / b, left = 1 - t / b, want; /* speeds while both run */
    if (c / left >= b) {                        /* the exchange ends first, both times */
      want = a + 2 * (c + t) + a;
    } else { /* GEMMs end first: the rest of the exchange runs alone; C2 begins at the end of S2, and likewise for R1 */
      double together = c / left, rest = a - together * own;
      want = a + together + rest + together + rest + a;
    }
    if (!(relative(got, want) < 1e-6))
      fail_msg("H %lld: %.6f ms, by hand %.6f", (long long)hidden, 1e3 * got, 1e3 * want);
  }
}
