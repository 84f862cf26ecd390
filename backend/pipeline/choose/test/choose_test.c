// SPDX-License-Identifier: Apache-2.0
/* The choice of limits in flight, and the timeline of a batch. */
#include <math.h>

#include "backend/base/json.h"
#include "backend/pipeline/choose/choose.h"
#include "backend/pipeline/policy_table.h"
#include "backend/pipeline/test/pipelines.h"
#include "backend/pipeline/timeline_json.h"

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
  if (sluice_pipeline_choose(spec, &times, tolerance, sluice_process_allocator(), &choice) != SLUICE_OK) {
    fail_msg("%s", last_message());
  }
  return choice;
}

static double makespan(const sluice_pipeline_spec_t* spec, double c) {
  sluice_pipeline_times_t times = times_of(spec, c);
  sluice_pipeline_program_t* program = program_of(spec);
  sluice_pipeline_result_t result;
  sluice_status_t status = sluice_pipeline_simulate(program, &times, sluice_process_allocator(), &result, NULL, NULL);
  assert_int_equal(status, SLUICE_OK);
  free_program(program);
  return result.makespan_s;
}

TEST(Choose_SlowerLinks_TakesMoreThanStages) {
  static const struct {
    int32_t p, limit;
    double c;
  } cases[] = {{2, 2, 0}, {2, 3, 0.25}, {2, 3, 0.5}, {4, 4, 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    sluice_pipeline_spec_t spec = pipeline_of(cases[i].p, 1, 16, SLUICE_POLICY_MESSAGE_DRIVEN, 0);
    assert_int_equal(choose(&spec, cases[i].c, 0.01).limit, cases[i].limit);
  }
  sluice_pipeline_spec_t spec = pipeline_of(4, 1, 16, SLUICE_POLICY_MESSAGE_DRIVEN, 0);
  assert_in_range(choose(&spec, 0.25, 0.01).limit, 5, 8);
}

TEST(Choose_OfEveryLimit_IsTheSmallestThatIsGoodEnough) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (sluice_policy(policy)->is_planned || policy == SLUICE_POLICY_FORWARD_ONLY) continue;
    sluice_pipeline_spec_t spec = pipeline_of(4, 1, 12, policy, 0);
    sluice_pipeline_choice_t choice = choose(&spec, 0.3, 0.02);
    double best = INFINITY, smaller = INFINITY;
    for (int32_t limit = 1; limit <= 12; ++limit) {
      for (int32_t c = 0; c < 4; ++c) spec.in_flight[c] = limit;
      double seconds = makespan(&spec, 0.3);
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
    assert_true(fabs(makespan(&spec, 0.3) - choice.makespan_s) < 1e-9);
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

/* ---- timelines ---- */

static double number(const sluice_json_t* event, const char* name) { return sluice_json_member(event, name)->number; }

TEST(Timeline_OfABatch_HoldsEachOpOnceInItsPlace) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 3, SLUICE_POLICY_1F1B, 0);
  sluice_pipeline_times_t times = times_of(&spec, 0.25);
  sluice_pipeline_program_t* program = program_of(&spec);
  double begin[64], end[64];
  assert_in_range(program->num_ops, 1, 64);
  sluice_pipeline_result_t result;
  sluice_status_t status = sluice_pipeline_simulate(program, &times, sluice_process_allocator(), &result, begin, end);
  assert_int_equal(status, SLUICE_OK);
  uint64_t length = sluice_pipeline_write_timeline(program, begin, end, NULL, 0);
  char* text = malloc(length + 1);
  assert_non_null(text);
  assert_int_equal(sluice_pipeline_write_timeline(program, begin, end, text, length + 1), length);
  sluice_json_tree_t tree;
  if (sluice_json_parse(text, length, "timeline", &tree) != SLUICE_OK) fail_msg("%s", last_message());
  const sluice_json_t* events = sluice_json_member(&tree.nodes[0], "events");
  assert_int_equal(events->count, 2 * 3 * 3); /* forward, backward, one message each way */
  double last = 0;
  for (const sluice_json_t* event = events->child; event != NULL; event = event->next) {
    assert_true(number(event, "begin_ns") < number(event, "end_ns"));
    assert_in_range(number(event, "rank"), 0, 1);
    assert_in_range(number(event, "chunk"), 0, 2);
    last = fmax(last, number(event, "end_ns"));
  }
  assert_true(fabs(last - 1e9 * result.makespan_s) < 1);
  sluice_json_free(&tree);
  end[program->num_ops - 2] = -1; /* the last op that is no flush has not run */
  assert_true(sluice_pipeline_write_timeline(program, begin, end, text, length + 1) < length);
  free(text);
  free_program(program);
}
