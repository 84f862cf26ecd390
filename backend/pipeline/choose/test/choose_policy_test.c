// SPDX-License-Identifier: Apache-2.0
/* The choice of a policy for a pipeline that leaves it open. */
#include "backend/pipeline/choose/choose_policy.h"
#include "backend/pipeline/test/pipelines.h"

/* f + b = 1: f is a third of it; the stage `slow` takes 1.5 times as long; messages take a quarter. */
static sluice_pipeline_times_t times_of(int32_t num_virtual_stages, int32_t slow) {
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

static double seconds_of(const sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times) {
  sluice_pipeline_program_t* program = program_of(spec);
  sluice_pipeline_result_t result;
  assert_int_equal(sluice_pipeline_simulate(program, times, sluice_process_allocator(), &result, NULL, NULL),
                   SLUICE_OK);
  free_program(program);
  return result.makespan_s;
}

static void close_policy(sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times) {
  if (sluice_pipeline_choose_policy(spec, times, 0.02, sluice_process_allocator()) != SLUICE_OK) {
    fail_msg("%s", last_message());
  }
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
  const sluice_pipeline_times_t times = times_of(4, -1);
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
    const double seconds = seconds_of(&taken, &times);
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
      assert_true(seconds <= 1.03001 * seconds_of(&other, &times));
    }
  }
}

TEST(Choose_WhereNothingFits_SaysWhich) {
  sluice_pipeline_spec_t spec = open_pipeline(2, 1, 0);
  const sluice_pipeline_times_t times = times_of(2, -1);
  spec.receives_ahead = 0;
  spec.activation_bytes[0] = spec.activation_bytes[1] = 100;
  spec.byte_limit[1] = 99;
  sluice_allocator_t* memory = sluice_process_allocator();
  REFUSED(sluice_pipeline_choose_policy(&spec, &times, 0.02, memory), SLUICE_E_OVER_BUDGET, "stage 1 take 100 bytes");
  assert_int_equal(spec.policy, SLUICE_POLICY_OPEN);
  assert_int_equal(sluice_pipeline_choose_policy(&spec, &times, -1, memory), SLUICE_E_INVALID_ARGUMENT);
}
