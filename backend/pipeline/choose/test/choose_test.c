// SPDX-License-Identifier: Apache-2.0
/* The choice of limits in flight, and of a policy for a pipeline that leaves it open. */
#include <math.h>

#include "backend/pipeline/choose/choose.h"
#include "backend/pipeline/test/pipelines.h"

static sluice_pipeline_times_t times_of(const sluice_pipeline_spec_t* spec, double c) {
  sluice_pipeline_times_t times = {.is_buffered = 0};
  for (int32_t i = 0; i < sluice_pipeline_num_virtual_stages(spec); ++i) {
    times.forward_s[i] = times.backward_s[i] = times.weight_s[i] = 1.0 / 3;
    times.latency_s[i] = c;
  }
  return times;
}

static sluice_pipeline_choice_t choose(const sluice_pipeline_spec_t* spec, double c, double tolerance) {
  sluice_pipeline_times_t times = times_of(spec, c);
  sluice_pipeline_choice_t choice;
  WORKS(sluice_pipeline_choose(spec, &times, tolerance, sluice_process_allocator(), &choice));
  return choice;
}

static double makespan(const sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times) {
  sluice_pipeline_program_t* program = program_of(spec);
  sluice_pipeline_result_t result;
  WORKS(sluice_pipeline_simulate(program, times, sluice_process_allocator(), &result, NULL, NULL));
  free_program(program);
  return result.makespan_s;
}

TEST(Choose_OfEveryLimit_IsTheSmallestThatIsGoodEnough) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (sluice_policy(policy)->is_planned || policy == SLUICE_POLICY_FORWARD_ONLY) continue;
    sluice_pipeline_spec_t spec = pipeline_of(4, 1, 12, policy, 0);
    sluice_pipeline_choice_t choice = choose(&spec, 0.3, 0.02);
    const sluice_pipeline_times_t times = times_of(&spec, 0.3);
    double best = INFINITY, smaller = INFINITY;
    for (int32_t limit = 1; limit <= 12; ++limit) {
      for (int32_t c = 0; c < 4; ++c) spec.in_flight[c] = limit;
      double seconds = makespan(&spec, &times);
      best = fmin(best, seconds);
      if (limit < choice.limit) smaller = fmin(smaller, seconds);
    }
    assert_true(fabs(choice.best_s - best) < 1e-9);
    assert_true(choice.makespan_s <= best * 1.02 + 1e-9);
    assert_true(smaller > best * 1.02 - 1e-9);
    assert_int_equal(choice.num_tried, 12);
    /* The chosen limits have the reported time. */
    memcpy(spec.in_flight, choice.in_flight, sizeof spec.in_flight);
    memcpy(spec.held, choice.held, sizeof spec.held);
    assert_true(fabs(makespan(&spec, &times) - choice.makespan_s) < 1e-9);
  }
}

TEST(Choose_UnderABudget_CutsTheStageThatHasLess) {
  sluice_pipeline_spec_t spec = pipeline_of(4, 1, 16, SLUICE_POLICY_MESSAGE_DRIVEN, 0);
  spec.receives_ahead = 0;
  for (int32_t c = 0; c < 4; ++c) spec.activation_bytes[c] = 100;
  double free_s = choose(&spec, 0.25, 0).makespan_s;
  spec.byte_limit[1] = 350;
  sluice_pipeline_choice_t choice = choose(&spec, 0.25, 0);
  assert_int_equal(choice.in_flight[1], 3);
  assert_true(choice.in_flight[0] > 3);
  assert_int_equal(choice.bytes[1], 300);
  assert_true(choice.makespan_s > free_s + 1e-9);
  memcpy(spec.in_flight, choice.in_flight, sizeof spec.in_flight);
  memcpy(spec.held, choice.held, sizeof spec.held);
  free_program(program_of(&spec));
  spec.byte_limit[2] = 99;
  sluice_pipeline_times_t times = times_of(&spec, 0.25);
  REFUSED(sluice_pipeline_choose(&spec, &times, 0, sluice_process_allocator(), &choice), SLUICE_E_OVER_BUDGET,
          "stage 2 take 100 bytes");
}

TEST(Choose_WithWeightGradientsApart_CountsWhatIsHeld) {
  sluice_pipeline_spec_t spec = pipeline_of(4, 1, 16, SLUICE_POLICY_BACKWARD_FIRST, 0);
  spec.separate_wgrad = 1;
  spec.receives_ahead = 0;
  for (int32_t c = 0; c < 4; ++c) spec.activation_bytes[c] = 100, spec.held_bytes[c] = 50, spec.byte_limit[c] = 600;
  sluice_pipeline_choice_t choice = choose(&spec, 0, 0);
  for (int32_t s = 0; s < 4; ++s) {
    assert_in_range(choice.bytes[s], 150, 600);
    assert_int_equal(choice.bytes[s], choice.in_flight[s] * 100 + choice.held[s] * 50);
  }
}

/* Held micro-batches may have less memory than those in flight, without known bytes. */
TEST(Choose_WhereHeldIsGiven_KeepsIt) {
  sluice_pipeline_spec_t spec = pipeline_of(4, 1, 16, SLUICE_POLICY_BACKWARD_FIRST, 0);
  spec.separate_wgrad = 1;
  const sluice_pipeline_choice_t open = choose(&spec, 0.25, 0);
  assert_true(open.held[3] > 2);
  for (int32_t c = 0; c < 4; ++c) spec.held[c] = 2;
  const sluice_pipeline_choice_t kept = choose(&spec, 0.25, 0);
  for (int32_t c = 0; c < 4; ++c) assert_in_range(kept.held[c], 1, 2);
  assert_true(kept.in_flight[0] > 2);
}

TEST(Choose_ManyMicroBatches_TriesInSteps) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 100, SLUICE_POLICY_MESSAGE_DRIVEN, 0);
  assert_int_equal(choose(&spec, 0.25, 0.01).limit, 3);
  assert_in_range(choose(&spec, 0.25, 0.01).num_tried, 17, 30);
}

TEST(Choose_WhatCannotBeChosen_IsRefused) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 4, SLUICE_POLICY_ZERO_BUBBLE, 0);
  sluice_pipeline_times_t times = times_of(&spec, 0);
  sluice_pipeline_choice_t choice;
  sluice_allocator_t* memory = sluice_process_allocator();
  REFUSED(sluice_pipeline_choose(&spec, &times, 0, memory, &choice), SLUICE_E_INVALID_ARGUMENT,
          "zero_bubble has a fixed number");
  spec = pipeline_of(2, 1, 4, SLUICE_POLICY_MESSAGE_DRIVEN, 0);
  assert_int_equal(sluice_pipeline_choose(&spec, &times, -1, memory, &choice), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_pipeline_choose(&spec, &times, NAN, memory, &choice), SLUICE_E_INVALID_ARGUMENT);
  spec.num_stages = 0;
  assert_int_equal(sluice_pipeline_choose(&spec, &times, 0, memory, &choice), SLUICE_E_INVALID_ARGUMENT);
}

/* ---- the policy ---- */

/* f + b = 1: f is a third of it; the stage `slow` takes 1.5 times as long; messages take a quarter. */
static sluice_pipeline_times_t quarter_messages(int32_t num_virtual_stages, int32_t slow) {
  sluice_pipeline_times_t times = {.is_buffered = 1};
  for (int32_t i = 0; i < num_virtual_stages; ++i) {
    const double factor = i == slow ? 1.5 : 1;
    times.forward_s[i] = factor / 3;
    times.backward_s[i] = 2 * factor / 3;
    times.latency_s[i] = 0.25;
  }
  return times;
}

static sluice_pipeline_spec_t open_pipeline(int32_t p, int32_t v, int32_t in_flight) {
  sluice_pipeline_spec_t spec = pipeline_of(p, v, 16, SLUICE_POLICY_BACKWARD_FIRST, in_flight);
  spec.policy = SLUICE_POLICY_OPEN;
  return spec;
}

static void close_policy(sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times) {
  WORKS(sluice_pipeline_choose_policy(spec, times, 0.02, sluice_process_allocator()));
}

TEST(Choose_WithoutTimes_TakesTheFirstThatFits) {
  sluice_pipeline_spec_t spec = open_pipeline(4, 1, 0);
  close_policy(&spec, NULL);
  assert_int_equal(spec.policy, SLUICE_POLICY_1F1B_HINT);
  assert_int_equal(spec.in_flight[0], 0);
  spec = open_pipeline(4, 2, 0);
  close_policy(&spec, NULL);
  assert_int_equal(spec.policy, SLUICE_POLICY_BACKWARD_FIRST);
}

TEST(Choose_EqualStages_KeepsTheRule) {
  sluice_pipeline_spec_t spec = open_pipeline(4, 1, 4);
  const sluice_pipeline_times_t times = quarter_messages(4, -1);
  close_policy(&spec, &times);
  assert_int_equal(spec.policy, SLUICE_POLICY_1F1B_HINT);
  assert_int_equal(spec.in_flight[0], 4);
}

/* For random times, limits, cuts and weight gradients: within the tolerance of every policy that supports the spec. */
TEST(Choose_DrawnPipelines_NoPolicyIsMuchFaster) {
  uint32_t drawn = 7;
  for (int32_t i = 0; i < 60; ++i) {
    const int32_t p = 2 + i % 3, v = 1 + (i / 3) % 2;
    sluice_pipeline_spec_t spec = open_pipeline(p, v, i % 4 == 0 ? 0 : p + i % 5);
    spec.separate_wgrad = i % 5 == 0;
    sluice_pipeline_times_t times = {.is_buffered = 1};
    for (int32_t c = 0; c < p * v; ++c) {
      drawn = drawn * 1664525u + 1013904223u;
      times.forward_s[c] = 0.1 + (drawn >> 20) / 4096.0;
      times.backward_s[c] = 2 * times.forward_s[c];
      times.weight_s[c] = spec.separate_wgrad ? times.forward_s[c] : 0;
      times.latency_s[c] = (drawn >> 8 & 255) / 512.0;
    }
    sluice_pipeline_spec_t taken = spec;
    close_policy(&taken, &times);
    const double seconds = makespan(&taken, &times);
    for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
      sluice_pipeline_spec_t other = taken;
      memcpy(other.in_flight, spec.in_flight, sizeof other.in_flight);
      other.policy = policy;
      if (policy == SLUICE_POLICY_GPIPE || sluice_policy_check(&other) != SLUICE_OK) continue;
      if (spec.in_flight[0] == 0 && !sluice_policy(policy)->is_planned) {
        memcpy(other.in_flight, taken.in_flight, sizeof other.in_flight);
      }
      sluice_pipeline_program_t* program;
      if (sluice_pipeline_program_build(&other, sluice_process_allocator(), &program) != SLUICE_OK) continue;
      free_program(program);
      assert_true(seconds <= 1.03001 * makespan(&other, &times));
    }
  }
}

TEST(Choose_WhereNothingFits_SaysWhich) {
  sluice_pipeline_spec_t spec = open_pipeline(2, 1, 0);
  const sluice_pipeline_times_t times = quarter_messages(2, -1);
  spec.receives_ahead = 0;
  spec.activation_bytes[0] = spec.activation_bytes[1] = 100;
  spec.byte_limit[1] = 99;
  sluice_allocator_t* memory = sluice_process_allocator();
  REFUSED(sluice_pipeline_choose_policy(&spec, &times, 0.02, memory), SLUICE_E_OVER_BUDGET, "stage 1 take 100 bytes");
  assert_int_equal(spec.policy, SLUICE_POLICY_OPEN);
  assert_int_equal(sluice_pipeline_choose_policy(&spec, &times, -1, memory), SLUICE_E_INVALID_ARGUMENT);
}
