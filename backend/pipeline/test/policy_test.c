// SPDX-License-Identifier: Apache-2.0
/* Policies: orders as published, and the choice of a stage among ready ops. */
#include <stdio.h>

#include "backend/pipeline/runner.h"
#include "backend/pipeline/test/pipelines.h"

TEST(Table_EveryRow_IsComplete) {
  for (int32_t i = 0; i < SLUICE_POLICY_COUNT; ++i) {
    const sluice_policy_t* row = sluice_policy(i);
    assert_non_null(row);
    assert_true(row->name[0] != '\0' && row->source[0] != '\0');
    assert_true(row->min_virtual >= 1);
    /* A policy has either an order or a rule. */
    assert_int_equal(row->is_planned, row->before == NULL);
    assert_true(!row->is_planned || row->order != NULL);
    for (int32_t j = 0; j < i; ++j) assert_string_not_equal(row->name, sluice_policy(j)->name);
  }
  assert_null(sluice_policy(-1));
  assert_null(sluice_policy(SLUICE_POLICY_COUNT));
}

/* The order of a stage, as text: a letter for each op (A, F, a: activation received, forward, sent; G, B, g: the same
 * for the gradient; W), and the micro-batch. */
static const char* order_of(const sluice_pipeline_spec_t* spec, int32_t stage) {
  static char text[1024];
  static const char letters[] = "AFaGBgW";
  sluice_pipeline_program_t* program = program_of(spec);
  size_t used = 0;
  for (int32_t i = program->first_position[stage]; i < program->first_position[stage + 1] - 1; ++i) {
    const sluice_stage_op_t* op = &program->ops[program->order[i]];
    assert_int_equal(op->place, i - program->first_position[stage]);
    used += (size_t)snprintf(text + used, sizeof text - used, "%s%c%d", used > 0 ? " " : "", letters[op->kind],
                             op->micro_batch);
    assert_true(used < sizeof text);
  }
  free_program(program);
  return text;
}

TEST(Order_DeepSpeed_IsThatOfItsTrainSchedule) {
  /* As TrainSchedule of DeepSpeed 0.19.8 gives it for three stages and three micro-batches. */
  sluice_pipeline_spec_t spec = pipeline_of(3, 1, 3, SLUICE_POLICY_DEEPSPEED, 0);
  assert_string_equal(order_of(&spec, 0), "F0 a0 F1 a1 F2 G0 a2 B0 G1 B1 G2 B2");
  assert_string_equal(order_of(&spec, 1), "A0 F0 a0 A1 F1 G0 a1 B0 g0 A2 F2 G1 a2 B1 g1 G2 B2 g2");
  assert_string_equal(order_of(&spec, 2), "A0 F0 B0 g0 A1 F1 B1 g1 A2 F2 B2 g2");
}

TEST(Order_1F1B_HasOneLessInFlightOnEachStage) {
  sluice_pipeline_spec_t spec = pipeline_of(3, 1, 4, SLUICE_POLICY_1F1B, 0);
  assert_string_equal(order_of(&spec, 0), "F0 F1 F2 B0 F3 B1 B2 B3");
  assert_string_equal(order_of(&spec, 1), "F0 F1 B0 F2 B1 F3 B2 B3");
  assert_string_equal(order_of(&spec, 2), "F0 B0 F1 B1 F2 B2 F3 B3");
  /* A limit on the first stage also limits the later ones, which could not use more. */
  spec.in_flight[0] = 1;
  assert_string_equal(order_of(&spec, 1), "F0 B0 F1 B1 F2 B2 F3 B3");
}

/* Forwards without an ended weight gradient never exceed `most` in the order of any stage. */
static void assert_keeps_at_most(const sluice_pipeline_spec_t* spec, int32_t most) {
  sluice_pipeline_program_t* program = program_of(spec);
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    int32_t kept = 0, reached = 0;
    for (int32_t i = program->first_position[s]; i < program->first_position[s + 1]; ++i) {
      int32_t kind = program->ops[program->order[i]].kind;
      kept += (kind == SLUICE_STAGE_FORWARD) - (kind == SLUICE_STAGE_WEIGHT_GRAD);
      if (kept > reached) reached = kept;
    }
    assert_int_equal(kept, 0);
    assert_in_range(reached, 1, most);
  }
  free_program(program);
}

TEST(Order_OfSplitWeightGradients_KeepsAsMuchAs1F1B) {
  for (int32_t p = 1; p <= 8; ++p) {
    for (int32_t m = 1; m <= 20; ++m) {
      sluice_pipeline_spec_t spec = pipeline_of(p, 1, m, SLUICE_POLICY_ZERO_BUBBLE, 0);
      assert_keeps_at_most(&spec, p);
      spec = pipeline_of(p, 2, m, SLUICE_POLICY_V, 0); /* of halves */
      assert_keeps_at_most(&spec, 2 * p);
    }
  }
}

/* ---- the next op ---- */

typedef struct bench_s {
  sluice_pipeline_program_t* program;
  sluice_runner_t runner;
} bench_t;

static bench_t begin(const sluice_pipeline_spec_t* spec, int32_t stage) {
  bench_t bench = {.program = program_of(spec)};
  assert_int_equal(sluice_runner_init(&bench.runner, bench.program, stage, sluice_process_allocator()), SLUICE_OK);
  return bench;
}

static void finish(bench_t* bench) {
  sluice_runner_deinit(&bench->runner, sluice_process_allocator());
  free_program(bench->program);
}

static int32_t find(const bench_t* bench, int32_t kind, int32_t i) {
  return sluice_pipeline_find(bench->program, kind, bench->runner.stage, i);
}

/* Runs the next op, which must be this one. */
static void runs(bench_t* bench, int32_t kind, int32_t i) {
  assert_int_equal(sluice_runner_next(&bench->runner), find(bench, kind, i));
  sluice_runner_end(&bench->runner, find(bench, kind, i));
}

static void arrives(bench_t* bench, int32_t kind, int32_t i) {
  sluice_runner_end(&bench->runner, find(bench, kind, i));
}

TEST(MessageDriven_FirstStage_InjectsLThenOneForEachGradient) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 4, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  bench_t bench = begin(&spec, 0);
  runs(&bench, SLUICE_STAGE_FORWARD, 0);
  arrives(&bench, SLUICE_STAGE_SEND_ACTIVATION, 0);
  arrives(&bench, SLUICE_STAGE_RECEIVE_GRADIENT, 0);
  runs(&bench, SLUICE_STAGE_FORWARD, 1); /* initialization precedes arrivals: lines 3 to 9 */
  arrives(&bench, SLUICE_STAGE_SEND_ACTIVATION, 1);
  arrives(&bench, SLUICE_STAGE_RECEIVE_GRADIENT, 1);
  runs(&bench, SLUICE_STAGE_BACKWARD, 0);
  runs(&bench, SLUICE_STAGE_FORWARD, 2); /* lines 23 to 26, before the gradient that has arrived */
  runs(&bench, SLUICE_STAGE_BACKWARD, 1);
  runs(&bench, SLUICE_STAGE_FORWARD, 3);
  assert_int_equal(sluice_runner_next(&bench.runner), -1);
  finish(&bench);
}

TEST(MessageDriven_LastStage_TurnsEachAroundAtOnce) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 2, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  bench_t bench = begin(&spec, 1);
  assert_int_equal(sluice_runner_next(&bench.runner), -1);
  arrives(&bench, SLUICE_STAGE_RECEIVE_ACTIVATION, 0);
  arrives(&bench, SLUICE_STAGE_RECEIVE_ACTIVATION, 1);
  runs(&bench, SLUICE_STAGE_FORWARD, 0);
  runs(&bench, SLUICE_STAGE_BACKWARD, 0);
  runs(&bench, SLUICE_STAGE_FORWARD, 1);
  runs(&bench, SLUICE_STAGE_BACKWARD, 1);
  finish(&bench);
}

/* A middle stage after one forward, with an input and a gradient ready; the input arrived first. */
static bench_t between(int32_t policy) {
  sluice_pipeline_spec_t spec = pipeline_of(3, 1, 4, policy, 4);
  bench_t bench = begin(&spec, 1);
  arrives(&bench, SLUICE_STAGE_RECEIVE_ACTIVATION, 0);
  runs(&bench, SLUICE_STAGE_FORWARD, 0);
  arrives(&bench, SLUICE_STAGE_SEND_ACTIVATION, 0);
  arrives(&bench, SLUICE_STAGE_RECEIVE_ACTIVATION, 1);
  arrives(&bench, SLUICE_STAGE_RECEIVE_GRADIENT, 0);
  return bench;
}

TEST(Policies_WithBothReady_ChooseByTheirRule) {
  bench_t bench = between(SLUICE_POLICY_MESSAGE_DRIVEN);
  runs(&bench, SLUICE_STAGE_FORWARD, 1); /* it arrived first */
  finish(&bench);
  bench = between(SLUICE_POLICY_BACKWARD_FIRST);
  runs(&bench, SLUICE_STAGE_BACKWARD, 0);
  finish(&bench);
  bench = between(SLUICE_POLICY_1F1B_HINT);
  runs(&bench, SLUICE_STAGE_FORWARD, 1); /* two are in flight on this stage of three */
  arrives(&bench, SLUICE_STAGE_RECEIVE_ACTIVATION, 2);
  runs(&bench, SLUICE_STAGE_BACKWARD, 0);
  runs(&bench, SLUICE_STAGE_FORWARD, 2);
  arrives(&bench, SLUICE_STAGE_RECEIVE_ACTIVATION, 3);
  runs(&bench, SLUICE_STAGE_FORWARD, 3); /* the hint says backward 1, which has not arrived */
  finish(&bench);
}

TEST(Runner_AtTheStart_PostsReceivesUpToTheLimitAndWhatIsAhead) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 9, SLUICE_POLICY_MESSAGE_DRIVEN, 3);
  bench_t bench = begin(&spec, 1);
  for (int32_t i = 0; i < 4; ++i) {
    assert_int_equal(sluice_runner_next_post(&bench.runner), find(&bench, SLUICE_STAGE_RECEIVE_ACTIVATION, i));
  }
  assert_int_equal(sluice_runner_next_post(&bench.runner), -1);
  assert_false(sluice_runner_is_done(&bench.runner));
  finish(&bench);
}
