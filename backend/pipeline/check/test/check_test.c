// SPDX-License-Identifier: Apache-2.0
/* Explores every interleaving of small pipelines. With SLUICE_FULL set: every limit of held micro-batches, and split
 * weight gradients over eight virtual stages. */

#include "backend/pipeline/check/check.h"
#include "backend/pipeline/test/pipelines.h"
#include "third_party/bazel/test.h"

static int64_t programs, states;

static void assert_sound(const sluice_pipeline_spec_t* spec, const sluice_pipeline_check_options_t* options) {
  sluice_pipeline_program_t* program = program_of(spec);
  sluice_pipeline_finding_t finding;
  int64_t seen = 0;
  if (sluice_pipeline_check(program, options, sluice_process_allocator(), &finding, &seen) != SLUICE_OK) {
    fail_msg("%s", last_message());
  }
  if (finding.fault != SLUICE_PIPELINE_FAULT_NONE) {
    char text[512];
    sluice_pipeline_finding_describe(program, &finding, text, sizeof text);
    fail_msg("p %d v %d m %d policy %s placement %d split %d in flight %d replicas %d buffered %d: %s",
             spec->num_stages, spec->num_virtual, spec->num_micro_batches, program->policy->name, spec->placement,
             spec->separate_wgrad, spec->in_flight[0], options->replicas, options->is_buffered, text);
  }
  ++programs;
  states += seen;
  free_program(program);
}

static void assert_sound_both_ways(const sluice_pipeline_spec_t* spec, int32_t replicas, int32_t is_reduced) {
  sluice_pipeline_check_options_t options;
  sluice_pipeline_check_options_init(&options);
  options.replicas = replicas;
  options.is_reduced = is_reduced;
  for (options.is_buffered = 0; options.is_buffered < 2; ++options.is_buffered) assert_sound(spec, &options);
}

static void report(const char* what) {
  print_message("%s: %lld programs, %lld states\n", what, (long long)programs, (long long)states);
  programs = states = 0;
}

/* Calls `check` with every p <= 4, m <= 4, v <= 2, both placements. */
static void for_sizes(int32_t policy, void (*check)(sluice_pipeline_spec_t* spec)) {
  const sluice_policy_t* row = sluice_policy(policy);
  for (int32_t p = 1; p <= 4; ++p) {
    for (int32_t v = row->min_virtual; v <= (row->max_virtual == 1 ? 1 : 2); ++v) {
      for (int32_t m = 1; m <= 4; ++m) {
        for (int32_t placement = 0; placement < 2; ++placement) {
          sluice_pipeline_spec_t spec = pipeline_of(p, v, m, policy, 0);
          if (row->placement >= 0 && placement != row->placement) continue;
          spec.placement = placement;
          check(&spec);
        }
      }
    }
  }
}

/* The explorer runs any ready op, so one policy that runs whatever is ready covers all such policies. */
static void check_limits(sluice_pipeline_spec_t* spec) {
  int32_t virtual_stages = spec->num_stages * spec->num_virtual;
  for (int32_t limit = 1; limit <= spec->num_micro_batches; ++limit) {
    for (int32_t c = 0; c < virtual_stages; ++c) spec->in_flight[c] = limit;
    for (spec->receives_ahead = 0; spec->receives_ahead < 2; ++spec->receives_ahead) {
      spec->separate_wgrad = 0;
      assert_sound_both_ways(spec, 1, 0);
      spec->separate_wgrad = 1;
      if (spec->forward_only || virtual_stages > 4) continue;
      int32_t step = getenv("SLUICE_FULL") != NULL || spec->num_micro_batches < 3 ? 1 : spec->num_micro_batches - 1;
      for (int32_t held = 1; held <= spec->num_micro_batches; held += step) {
        for (int32_t c = 0; c < virtual_stages; ++c) spec->held[c] = held;
        assert_sound_both_ways(spec, 1, 0);
      }
      spec->separate_wgrad = 0;
    }
  }
}

TEST(Explore_WhateverIsReady_NeverFails) {
  for_sizes(SLUICE_POLICY_MESSAGE_DRIVEN, check_limits);
  report("whatever is ready");
}

TEST(Explore_ForwardOnly_NeverFails) {
  for_sizes(SLUICE_POLICY_FORWARD_ONLY, check_limits);
  report("forward only");
}

static void check_plan(sluice_pipeline_spec_t* spec) {
  if (spec->policy == SLUICE_POLICY_LOOPED && spec->num_micro_batches % spec->num_stages != 0) return;
  assert_sound_both_ways(spec, 1, 0);
}

TEST(Explore_EveryPlan_NeverFails) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (sluice_policy(policy)->is_planned) for_sizes(policy, check_plan);
  }
  report("plans");
}

/* Reductions of gradients: with one replica, and in columns of replicas. */
static void check_reductions(sluice_pipeline_spec_t* spec) {
  const int32_t is_free = sluice_policy(spec->policy)->separate_wgrad < 0;
  if (spec->num_stages * spec->num_virtual > 4 || spec->num_micro_batches > 3) return;
  if (spec->policy == SLUICE_POLICY_LOOPED && spec->num_micro_batches % spec->num_stages != 0) return;
  spec->reduces = 1;
  for (int32_t split = 0; split < (is_free ? 2 : 1); ++split) {
    if (split) spec->separate_wgrad = 1;
    assert_sound_both_ways(spec, 1, 0);
    if (spec->num_stages * spec->num_virtual <= 2) assert_sound_both_ways(spec, 2, 1);
  }
}

TEST(Explore_WithReductions_NeverFails) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (policy != SLUICE_POLICY_FORWARD_ONLY) for_sizes(policy, check_reductions);
  }
  report("gradients are reduced");
}

TEST(Explore_1F1BUnderEveryLimit_NeverFails) {
  for (int32_t limits = 0; limits < 64; ++limits) {
    sluice_pipeline_spec_t spec = pipeline_of(3, 1, 4, SLUICE_POLICY_1F1B, 0);
    for (int32_t c = 0; c < 3; ++c) spec.in_flight[c] = 1 + (limits >> 2 * c & 3);
    assert_sound_both_ways(&spec, 1, 0);
    spec.policy = SLUICE_POLICY_MESSAGE_DRIVEN;
    assert_sound_both_ways(&spec, 1, 0);
  }
  report("a limit of its own on each of three stages");
}

/* ---- columns of replicas ---- */

static void check_columns(sluice_pipeline_spec_t* spec) {
  int32_t virtual_stages = spec->num_stages * spec->num_virtual;
  int32_t is_planned = sluice_policy(spec->policy)->is_planned;
  if (spec->policy == SLUICE_POLICY_LOOPED && spec->num_micro_batches % spec->num_stages != 0) return;
  /* Sets of virtual stages with experts: any of four, all or every other of eight. */
  for (int32_t set = virtual_stages <= 4 ? 0 : 1; set < (virtual_stages <= 4 ? 1 << virtual_stages : 3); ++set) {
    int32_t experts = virtual_stages <= 4 ? set : set == 1 ? 0xff : 0x55;
    for (int32_t c = 0; c < virtual_stages; ++c) spec->expert_parallel[c] = (uint8_t)(experts >> c & 1);
    for (int32_t limit = is_planned ? 0 : 1; limit <= (is_planned ? 0 : spec->num_micro_batches); ++limit) {
      for (int32_t c = 0; c < virtual_stages; ++c) spec->in_flight[c] = limit;
      assert_sound_both_ways(spec, 2, 1);
    }
  }
}

TEST(Explore_ColumnsThatFollowTheirFirst_NeverFail) {
  for_sizes(SLUICE_POLICY_MESSAGE_DRIVEN, check_columns);
  report("columns");
}

TEST(Explore_ColumnsUnderEveryPlan_NeverFail) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (sluice_policy(policy)->is_planned) for_sizes(policy, check_columns);
  }
  report("columns under plans");
}

static void check_column_of_weights(sluice_pipeline_spec_t* spec) {
  int32_t virtual_stages = spec->num_stages * spec->num_virtual;
  if (virtual_stages > 2 || spec->num_micro_batches > 3) return;
  spec->separate_wgrad = 1;
  for (int32_t experts = 1; experts < 1 << virtual_stages; ++experts) {
    for (int32_t c = 0; c < virtual_stages; ++c) {
      spec->expert_parallel[c] = (uint8_t)(experts >> c & 1);
      spec->in_flight[c] = 2;
      spec->held[c] = 1;
    }
    assert_sound_both_ways(spec, 2, 1);
  }
}

TEST(Explore_ColumnsWithSplitWeightGradients_NeverFail) {
  for_sizes(SLUICE_POLICY_MESSAGE_DRIVEN, check_column_of_weights);
  report("columns, split weight gradients");
}

TEST(Explore_ColumnsInFull_FindNoMoreThanReduced) {
  for (int32_t limit = 1; limit <= 3; ++limit) {
    sluice_pipeline_spec_t spec = pipeline_of(2, 1, 3, SLUICE_POLICY_MESSAGE_DRIVEN, limit);
    for (int32_t experts = 0; experts < 4; ++experts) {
      for (int32_t c = 0; c < 2; ++c) spec.expert_parallel[c] = (uint8_t)(experts >> c & 1);
      assert_sound_both_ways(&spec, 2, 0);
    }
  }
  report("columns in full");
}

TEST(Explore_EightVirtualStagesWithSplitWeightGradients_NeverFail) {
  if (getenv("SLUICE_FULL") == NULL) skip_because("needs SLUICE_FULL");
  sluice_pipeline_spec_t spec = pipeline_of(4, 2, 3, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  spec.separate_wgrad = 1;
  for (spec.placement = 0; spec.placement < 2; ++spec.placement) {
    for (int32_t held = 1; held <= 2; ++held) {
      for (int32_t c = 0; c < 8; ++c) spec.held[c] = held;
      assert_sound_both_ways(&spec, 1, 0);
    }
  }
  report("eight virtual stages, split weight gradients");
}

/* ---- errors ---- */

TEST(Check_TooLargeOrOutOfRange_IsRefused) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 16, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  sluice_pipeline_program_t* program = program_of(&spec);
  sluice_pipeline_check_options_t options;
  sluice_pipeline_check_options_init(&options);
  sluice_pipeline_finding_t finding;
  sluice_allocator_t* memory = sluice_process_allocator();
  REFUSED(sluice_pipeline_check(program, &options, memory, &finding, NULL), SLUICE_E_INVALID_ARGUMENT,
          "stage 0 has 65 ops");
  options.replicas = 5;
  assert_int_equal(sluice_pipeline_check(program, &options, memory, &finding, NULL), SLUICE_E_INVALID_ARGUMENT);
  free_program(program);
}
