// SPDX-License-Identifier: Apache-2.0
/* Rates from observed passes: medians on simulated machines, and the order of plans that follows from them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

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
  sluice_plan_rates_t r = {1, 2, 3};
  for (int i = 0; i < 40; ++i) {
    assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, &r), i >= SLUICE_OBSERVED_LEAST);
    if (i < SLUICE_OBSERVED_LEAST) assert_true(r.flops == 1 && r.link_bytes == 2 && r.startup_seconds == 3);
    const sluice_observed_forward_t p = forward(3e10, 2e7, 1e-3, 1 + i % 4, i % 5 == 1);
    sluice_observed_rates_add(&observed, SLUICE_DTYPE_F32, &p);
  }
  assert_true(relative(r.flops, 3e10) < 1e-9 && relative(r.link_bytes, 2e7) < 1e-9);
  assert_true(relative(r.startup_seconds, 1e-3) < 1e-9);
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_BF16, &r), 0); /* another dtype has other rates */
  /* The machine changes: the last passes decide. */
  for (int i = 0; i < SLUICE_OBSERVED_PASSES; ++i) {
    const sluice_observed_forward_t p = forward(1e10, 4e8, 1e-5, 2, 0);
    sluice_observed_rates_add(&observed, SLUICE_DTYPE_F32, &p);
  }
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, &r), 1);
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
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, &r), 0);
  const sluice_observed_forward_t good = forward(1e10, 1e8, 1e-4, 2, 0);
  for (int i = 0; i < 9; ++i) sluice_observed_rates_add(&observed, 77, &good); /* no dtype */
  assert_int_equal(sluice_observed_rates_of(&observed, 77, &r), 0);
  /* If start-ups seem to take the whole lane time, a tenth of it is left for rows. */
  sluice_observed_forward_t odd = good;
  odd.startup_seconds = 1;
  for (int i = 0; i < 3; ++i) sluice_observed_rates_add(&observed, SLUICE_DTYPE_F32, &odd);
  assert_int_equal(sluice_observed_rates_of(&observed, SLUICE_DTYPE_F32, &r), 1);
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

/* If not both tensors can be kept, a slow link favours recomputation and slow GEMMs favour sending again; long
 * start-ups favour fewer chunks. The default rates show none of this. */
TEST(Order_OfPlans_FollowsWhatWasSeen) {
  const sluice_moe_config_t config = {
      .model_width = 256, .hidden_width = 512, .num_experts = 8, .top_k = 2, .dtype = SLUICE_DTYPE_F32};
  sluice_plan_problem_t problem = {0};
  sluice_shape_init(&problem.shape, &config, NULL, 0, 2, NULL, 0);
  const sluice_plan_rates_t slow_link = {1e11, 2e7, 1e-5}, slow_gemms = {2e9, 5e9, 1e-5}, late = {1e11, 5e8, 2e-2};
  assert_int_equal(best_of(&problem, &slow_link, 1).restore_pre_activation, SLUICE_RESTORE_RECOMPUTE);
  assert_int_equal(best_of(&problem, &slow_gemms, 1).restore_input, SLUICE_RESTORE_REDISPATCH);
  assert_int_equal(best_of(&problem, &late, 0).num_chunks, 1);
  assert_true(best_of(&problem, NULL, 0).num_chunks > 1 && best_of(&problem, &slow_link, 0).num_chunks > 1);
}
