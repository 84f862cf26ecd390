// SPDX-License-Identifier: Apache-2.0
/* Programs: placement, limits, refusals, and needs of which none is superfluous. //backend/pipeline/check:check_test
 * shows that ops, matches and needs suffice. */
#include "backend/pipeline/test/pipelines.h"

TEST(Placement_LoopedAndV_FollowTheLayers) {
  sluice_pipeline_spec_t spec = {.num_stages = 3, .num_virtual = 3};
  const int32_t looped[] = {0, 1, 2, 0, 1, 2, 0, 1, 2}, v[] = {0, 1, 2, 2, 1, 0, 0, 1, 2};
  for (int32_t c = 0; c < 9; ++c) {
    spec.placement = SLUICE_PLACEMENT_LOOPED;
    assert_int_equal(sluice_pipeline_stage_of(&spec, c), looped[c]);
    assert_int_equal(sluice_pipeline_virtual_stage(&spec, looped[c], c / 3), c);
    spec.placement = SLUICE_PLACEMENT_V;
    assert_int_equal(sluice_pipeline_stage_of(&spec, c), v[c]);
    assert_int_equal(sluice_pipeline_virtual_stage(&spec, v[c], c / 3), c);
    if (c < 8) assert_int_equal(sluice_pipeline_crosses(&spec, c), v[c] != v[c + 1]);
  }
}

/* Forms with different sets of ops. */
static const struct {
  int32_t p, v, m, policy, in_flight, placement, separate_wgrad;
} forms[] = {
    {1, 1, 1, SLUICE_POLICY_MESSAGE_DRIVEN, 1, 0, 0},
    {2, 1, 4, SLUICE_POLICY_MESSAGE_DRIVEN, 2, 0, 0},
    {4, 1, 6, SLUICE_POLICY_BACKWARD_FIRST, 3, 0, 1},
    {3, 2, 5, SLUICE_POLICY_BACKWARD_FIRST, 4, 0, 0},
    {3, 2, 5, SLUICE_POLICY_BACKWARD_FIRST, 2, 1, 1},
    {2, 3, 4, SLUICE_POLICY_MESSAGE_DRIVEN, 2, 1, 0},
    {4, 1, 6, SLUICE_POLICY_1F1B, 0, 0, 0},
    {3, 2, 4, SLUICE_POLICY_FORWARD_ONLY, 2, 1, 0},
    {4, 2, 8, SLUICE_POLICY_V, 0, 1, 1},
    {1, 4, 3, SLUICE_POLICY_MESSAGE_DRIVEN, 2, 0, 1},
    {4, 1, 5, SLUICE_POLICY_DEEPSPEED, 0, 0, 0},
    {4, 2, 8, SLUICE_POLICY_LOOPED, 0, 0, 0},
};
#define NUM_FORMS ((int32_t)(sizeof forms / sizeof forms[0]))

static sluice_pipeline_program_t* form(int32_t f) {
  sluice_pipeline_spec_t spec = pipeline_of(forms[f].p, forms[f].v, forms[f].m, forms[f].policy, forms[f].in_flight);
  spec.placement = forms[f].placement;
  spec.separate_wgrad = forms[f].separate_wgrad;
  return program_of(&spec);
}

/* reaches[a · n + b]: b follows a, by needs within a stage; `without` is one need that is ignored. */
static void close(const sluice_pipeline_program_t* program, int32_t stage, int32_t without, char* reaches) {
  int32_t first = program->first_op[stage], n = program->first_op[stage + 1] - first;
  memset(reaches, 0, (size_t)n * (size_t)n);
  for (int32_t b = 0; b < n; ++b) {
    const sluice_stage_op_t* op = &program->ops[first + b];
    for (int32_t k = 0; k < op->num_needs; ++k) {
      if (op->first_need + k == without) continue;
      int32_t a = program->needs[op->first_need + k] - first;
      assert_in_range(a, 0, b - 1);
      reaches[a * n + b] = 1;
      for (int32_t x = 0; x < a; ++x) reaches[x * n + b] |= reaches[x * n + a];
    }
  }
}

TEST(Needs_OfEveryForm_NoneIsSuperfluous) {
  for (int32_t f = 0; f < NUM_FORMS; ++f) {
    sluice_pipeline_program_t* program = form(f);
    for (int32_t s = 0; s < program->spec.num_stages; ++s) {
      int32_t first = program->first_op[s], n = program->first_op[s + 1] - first;
      char* reaches = malloc((size_t)n * (size_t)n);
      assert_non_null(reaches);
      for (int32_t b = 0; b < n; ++b) {
        const sluice_stage_op_t* op = &program->ops[first + b];
        for (int32_t k = 0; k < op->num_needs; ++k) {
          close(program, s, op->first_need + k, reaches);
          assert_false(reaches[(program->needs[op->first_need + k] - first) * n + b]);
        }
      }
      free(reaches);
    }
    free_program(program);
  }
}

TEST(Build_WhatDoesNotFit_IsRefusedByName) {
  const sluice_pipeline_spec_t good = pipeline_of(2, 1, 4, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  sluice_pipeline_spec_t spec;
#define REFUSED_SPEC(change, text) spec = good, change, assert_refused(&spec, SLUICE_E_INVALID_ARGUMENT, text)
  REFUSED_SPEC(spec.num_stages = 0, "num_stages is 0");
  REFUSED_SPEC(spec.num_stages = 65, "num_stages is 65");
  REFUSED_SPEC(spec.num_virtual = 65, "num_virtual is 65");
  REFUSED_SPEC(spec.num_micro_batches = 0, "num_micro_batches is 0");
  REFUSED_SPEC(spec.num_micro_batches = 1025, "num_micro_batches is 1025");
  REFUSED_SPEC(spec.placement = 2, "placement is 2");
  REFUSED_SPEC(spec.policy = SLUICE_POLICY_COUNT, "policy is 10");
  REFUSED_SPEC(spec.policy = -1, "policy is -1");
  REFUSED_SPEC(spec.receives_ahead = -1, "receives_ahead is -1");
  REFUSED_SPEC(spec.in_flight[1] = -1, "virtual stage 1: in_flight is -1");
  REFUSED_SPEC(spec.held[0] = -2, "held is -2");
  REFUSED_SPEC((spec.separate_wgrad = 1, spec.forward_only = 1), "exclude each other");
  REFUSED_SPEC(spec.forward_only = 1, "message_driven needs forward_only = 0");
  REFUSED_SPEC(spec.policy = SLUICE_POLICY_FORWARD_ONLY, "forward_only needs forward_only = 1");
  REFUSED_SPEC(spec.policy = SLUICE_POLICY_ZERO_BUBBLE, "zero_bubble needs separate_wgrad = 1");
  REFUSED_SPEC(spec.policy = SLUICE_POLICY_LOOPED, "looped needs 2 to 128 virtual stages");
  REFUSED_SPEC((spec.policy = SLUICE_POLICY_V, spec.num_virtual = 2), "v needs placement 1");
  REFUSED_SPEC((spec.policy = SLUICE_POLICY_1F1B, spec.num_virtual = 2), "1f1b needs 1 to 1 virtual stages");
  REFUSED_SPEC((spec.policy = SLUICE_POLICY_GPIPE), "gpipe has all 4 micro-batches in flight");
  REFUSED_SPEC((spec.policy = SLUICE_POLICY_LOOPED, spec.num_virtual = 2, spec.num_micro_batches = 3),
               "multiple of num_stages = 2");
  /* The stock order ignores limits, and would deadlock. */
  REFUSED_SPEC((spec.policy = SLUICE_POLICY_DEEPSPEED, spec.in_flight[0] = 1), "waits forever");
  spec = good, spec.activation_bytes[1] = 100, spec.message_bytes[0] = 10, spec.byte_limit[1] = 209;
  assert_refused(&spec, SLUICE_E_OVER_BUDGET, "stage 1 take 210 bytes and its limit is 209");
  spec.byte_limit[1] = 210;
  free_program(program_of(&spec));
}

TEST(Limits_ThatAreLeftOpen_BecomeThePolicys) {
  sluice_pipeline_spec_t spec = pipeline_of(4, 1, 8, SLUICE_POLICY_MESSAGE_DRIVEN, 0);
  sluice_pipeline_program_t* program = program_of(&spec);
  for (int32_t s = 0; s < 4; ++s) assert_int_equal(program->spec.in_flight[s], 4);
  free_program(program);
  spec = pipeline_of(4, 1, 8, SLUICE_POLICY_ZERO_BUBBLE, 0);
  program = program_of(&spec);
  for (int32_t s = 0; s < 4; ++s) {
    assert_int_equal(program->spec.in_flight[s], 4 - s);
    assert_int_equal(program->spec.held[s], 1 + s);
  }
  free_program(program);
}

TEST(Build_EveryFailingAllocation_IsNoMemoryAndLeaksNothing) {
  const sluice_pipeline_spec_t spec = pipeline_of(3, 1, 4, SLUICE_POLICY_1F1B, 0);
  for (int64_t n = 0;; ++n) {
    sluice_allocator_t allocator;
    sluice_allocator_init(&allocator, NULL, NULL, NULL);
    allocator.fail_after = n;
    sluice_pipeline_program_t* program = NULL;
    sluice_status_t status = sluice_pipeline_program_build(&spec, &allocator, &program);
    sluice_pipeline_program_destroy(program, &allocator);
    uint64_t live = allocator.num_live, bytes = allocator.current_bytes;
    sluice_allocator_deinit(&allocator);
    assert_int_equal(live, 0);
    assert_int_equal(bytes, 0);
    if (status == SLUICE_OK) {
      assert_int_equal(n, 4);
      return;
    }
    assert_int_equal(status, SLUICE_E_NO_MEMORY);
    assert_null(program);
  }
}

TEST(Program_AsLargeAsItMayBe_IsBuilt) {
  sluice_pipeline_spec_t spec = pipeline_of(64, 2, 512, SLUICE_POLICY_BACKWARD_FIRST, 512);
  free_program(program_of(&spec));
}
