// SPDX-License-Identifier: Apache-2.0
/* Rates from observed passes: medians on simulated machines, and the order of plans that follows from them. */
#include <math.h>

#include "backend/tune/observed_rates.h"
#include "third_party/bazel/test.h"

static double relative(double got, double want) { return fabs(got / want - 1); }

/* A forward of n chunks on a machine with these flops and bytes per second, whose exchanges begin after `startup`; a
 * `disturbed` forward takes ten times as long. */
static sluice_observed_forward_t forward(double flops, double link, double startup, int32_t n, int disturbed) {
  sluice_observed_forward_t p = {.flops = 1e8, .bytes = 1e6, .num_exchanges = 2 * n, .startup_seconds = startup};
  p.compute_seconds = p.flops / flops, p.comm_seconds = p.bytes / link + 2 * n * startup;
  if (disturbed) p.compute_seconds *= 10, p.comm_seconds *= 10;
  return p;
}

TEST(Rates_FewPassesDisturbed_AreTheMachines) {
  sluice_observed_rates_t observed;
  memset(&observed, 0, sizeof observed);
  sluice_plan_rates_t r = {.flops = 1, .link_bytes = 2, .startup_seconds = 3};
  for (int i = 0; i < 40; ++i) {
    assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, 0, &r), i >= SLUICE_OBSERVED_LEAST);
    if (i < SLUICE_OBSERVED_LEAST) assert_true(r.flops == 1 && r.link_bytes == 2 && r.startup_seconds == 3);
    const sluice_observed_forward_t p = forward(3e10, 2e7, 1e-3, 1 + i % 4, i % 5 == 1);
    sluice_observed_rates_add(&observed, SLUICE_DTYPE_F32, &p);
  }
  assert_true(relative(r.flops, 3e10) < 1e-9 && relative(r.link_bytes, 2e7) < 1e-9);
  assert_true(relative(r.startup_seconds, 1e-3) < 1e-9);
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_BF16, 0, &r),
                   0); /* another dtype has other rates */
  /* The machine changes: the last passes decide. */
  for (int i = 0; i < SLUICE_OBSERVED_PASSES; ++i) {
    const sluice_observed_forward_t p = forward(1e10, 4e8, 1e-5, 2, 0);
    sluice_observed_rates_add(&observed, SLUICE_DTYPE_F32, &p);
  }
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, 0, &r), 1);
  assert_true(relative(r.flops, 1e10) < 1e-9 && relative(r.link_bytes, 4e8) < 1e-9);
}

TEST(Rates_PassesThatSayNothing_AreLeftOut) {
  sluice_observed_rates_t observed;
  memset(&observed, 0, sizeof observed);
  sluice_plan_rates_t r;
  sluice_observed_forward_t p[5];
  for (int i = 0; i < 5; ++i) p[i] = forward(1e10, 1e8, 1e-4, 2, 0);
  p[0].compute_seconds = 0, p[1].comm_seconds = 0, p[2].bytes = 0, p[3].flops = 0, p[4].flops = NAN;
  for (int i = 0; i < 50; ++i) sluice_observed_rates_add(&observed, SLUICE_DTYPE_F32, &p[i % 5]);
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, 0, &r), 0);
  const sluice_observed_forward_t good = forward(1e10, 1e8, 1e-4, 2, 0);
  for (int i = 0; i < 9; ++i) sluice_observed_rates_add(&observed, 77, &good); /* no dtype */
  assert_int_equal(sluice_observed_rates_of(&observed, 77, 0, &r), 0);
  /* If start-ups seem to take the whole lane time, a tenth of it is left for rows. */
  sluice_observed_forward_t odd = good;
  odd.startup_seconds = 1;
  for (int i = 0; i < 3; ++i) sluice_observed_rates_add(&observed, SLUICE_DTYPE_F32, &odd);
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, 0, &r), 1);
  assert_true(relative(r.link_bytes, odd.bytes / (0.1 * odd.comm_seconds)) < 1e-9);
}

/* The first of all (n, policies) by relative time. */
static sluice_plan_data_t best_of(const sluice_plan_problem_t* problem, const sluice_plan_rates_t* rates,
                                  int32_t least_restore) {
  static const int32_t chunks[] = {1, 2, 4, 8, 16}, pre_activation[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_RECOMPUTE};
  sluice_plan_data_t best;
  memset(&best, 0, sizeof best);
  best.cost = INFINITY;
  for (int i = 0; i < 5; ++i) {
    for (int policy = least_restore; policy < 3; ++policy) { /* keep, send again, or recompute */
      sluice_plan_data_t plan;
      memset(&plan, 0, sizeof plan);
      plan.inputs.max_tokens = 1024, plan.num_chunks = chunks[i];
      plan.restore_input = policy == 1 ? SLUICE_RESTORE_REDISPATCH : SLUICE_RESTORE_KEEP;
      plan.restore_pre_activation = pre_activation[policy == 2];
      plan.cost = sluice_plan_relative_time(problem, &plan, rates);
      if (plan.cost < best.cost) best = plan;
    }
  }
  return best;
}

/* If at most one tensor can be kept, a slow link favours recomputation and slow GEMMs favour sending again; long
 * start-ups favour fewer chunks. The default rates show none of this. */
TEST(Order_OfPlans_FollowsWhatWasSeen) {
  const sluice_moe_config_t config = {
      .model_width = 256, .hidden_width = 512, .num_experts = 8, .top_k = 2, .dtype = SLUICE_DTYPE_F32};
  sluice_plan_problem_t problem = {0};
  sluice_shape_init(&problem.shape, &config, NULL, 0, 2, NULL, 0);
  const sluice_plan_rates_t slow_link = {.flops = 1e11, .link_bytes = 2e7, .startup_seconds = 1e-5},
                            slow_gemms = {.flops = 2e9, .link_bytes = 5e9, .startup_seconds = 1e-5},
                            late = {.flops = 1e11, .link_bytes = 5e8, .startup_seconds = 2e-2};
  assert_int_equal(best_of(&problem, &slow_link, 1).restore_pre_activation, SLUICE_RESTORE_RECOMPUTE);
  assert_int_equal(best_of(&problem, &slow_gemms, 1).restore_input, SLUICE_RESTORE_REDISPATCH);
  assert_int_equal(best_of(&problem, &late, 0).num_chunks, 1);
  assert_true(best_of(&problem, NULL, 0).num_chunks > 1 && best_of(&problem, &slow_link, 0).num_chunks > 1);
}

static void see(sluice_observed_rates_t* observed, double memory, double copies) {
  const sluice_observed_forward_t p = forward(6e14, 4.5e10, 1e-5, 2, 0);
  for (int i = 0; i < SLUICE_OBSERVED_LEAST; ++i) {
    sluice_observed_rates_add(observed, SLUICE_DTYPE_BF16, &p);
    sluice_observed_rates_add_bytes(observed, memory, copies);
  }
}

/* At first no pass has offloaded rows, so a rate is assumed; measured rates replace it. */
TEST(Rates_OfCopies_AreThoseOfMemoryOrASlotUntilSomeRan) {
  static const struct { double memory, slot; } machines[] = {{8e9, 8e9}, {2.4e12, 2.5e10}};
  for (int is_device = 0; is_device < 2; ++is_device) {
    sluice_observed_rates_t observed;
    memset(&observed, 0, sizeof observed);
    sluice_plan_rates_t r;
    see(&observed, 0, 0);
    assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_BF16, is_device, &r), 1);
    assert_true(r.memory_bytes == 0 && r.copy_bytes == 0);
    see(&observed, machines[is_device].memory, NAN);
    assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_BF16, is_device, &r), 1);
    assert_true(r.memory_bytes == machines[is_device].memory && r.copy_bytes == machines[is_device].slot);
    see(&observed, 0, 5e10);
    assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_BF16, is_device, &r), 1);
    assert_true(r.memory_bytes == machines[is_device].memory && r.copy_bytes == 5e10);
  }
}

/* GPT-XL on 64 GPUs: seconds of the fastest n with both tensors restored. */
static double fastest(const sluice_plan_rates_t* rates, int32_t restore_input, int32_t wgrad_mode) {
  const sluice_moe_config_t config = {
      .model_width = 2048, .hidden_width = 8192, .num_experts = 64, .top_k = 1, .dtype = SLUICE_DTYPE_BF16};
  sluice_plan_problem_t problem = {0};
  sluice_shape_init(&problem.shape, &config, NULL, 0, 64, NULL, 0);
  double best = INFINITY;
  for (int32_t n = 2; n <= 16; n *= 2) {
    sluice_plan_data_t plan;
    memset(&plan, 0, sizeof plan);
    plan.inputs.max_tokens = 16384, plan.num_chunks = n, plan.wgrad_mode = wgrad_mode;
    plan.restore_input = restore_input, plan.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
    best = fmin(best, sluice_plan_relative_time(&problem, &plan, rates));
  }
  return best;
}

/* On a GPU of 600 TFLOP/s the observed rates bring S3 (offload and recompute) into the race with S4 (send again and
 * recompute), and per-chunk weight gradients too; only plans within 1.25 of the cheapest race. */
TEST(Order_OnADevice_ObservedBytesBringOffloadingIntoTheRace) {
  sluice_observed_rates_t observed;
  memset(&observed, 0, sizeof observed);
  sluice_plan_rates_t r;
  see(&observed, 2.4e12, 0);
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_BF16, 1, &r), 1);
  sluice_plan_rates_t blind = r;
  blind.memory_bytes = blind.copy_bytes = 0;
  const double s4 = fastest(&r, SLUICE_RESTORE_REDISPATCH, SLUICE_WGRAD_DEFERRED);
  const double s3 = fastest(&r, SLUICE_RESTORE_OFFLOAD, SLUICE_WGRAD_DEFERRED);
  const double chunked = fastest(&r, SLUICE_RESTORE_REDISPATCH, SLUICE_WGRAD_PER_CHUNK);
  const double blind_s3 = fastest(&blind, SLUICE_RESTORE_OFFLOAD, SLUICE_WGRAD_DEFERRED);
  printf("S3 %.3f of S4, %.3f by constants; per chunk %.3f\n", s3 / s4, blind_s3 / s4, chunked / s4);
  assert_true(s3 < 1.25 * s4 && blind_s3 > 1.25 * s4 && chunked < 1.25 * s4);
  assert_true(fastest(&blind, SLUICE_RESTORE_REDISPATCH, SLUICE_WGRAD_PER_CHUNK) > 1.25 * s4);
}
