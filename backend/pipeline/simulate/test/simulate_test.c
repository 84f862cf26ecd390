// SPDX-License-Identifier: Apache-2.0
/* The simulator: values by formula, and invariants of every run. capi/test/pipeline has the published values. */
#include <math.h>

#include "backend/pipeline/simulate/simulate.h"
#include "backend/pipeline/test/pipelines.h"

#define NEXT_TO_NOTHING 1e-9

static sluice_pipeline_times_t times_of(const sluice_pipeline_spec_t* spec, double f, double b, double w, double c) {
  sluice_pipeline_times_t times = {.is_buffered = 0};
  for (int32_t i = 0; i < sluice_pipeline_num_virtual_stages(spec); ++i) {
    times.forward_s[i] = f / spec->num_virtual;
    times.backward_s[i] = b / spec->num_virtual;
    times.weight_s[i] = w / spec->num_virtual;
    times.latency_s[i] = c;
  }
  return times;
}

static sluice_pipeline_result_t simulate(const sluice_pipeline_spec_t* spec, const sluice_pipeline_times_t* times) {
  sluice_pipeline_program_t* program = program_of(spec);
  sluice_pipeline_result_t result;
  sluice_status_t status = sluice_pipeline_simulate(program, times, sluice_process_allocator(), &result, NULL, NULL);
  free_program(program);
  if (status != SLUICE_OK) fail_msg("%s", last_message());
  return result;
}

static void assert_near(double value, double expected, double tolerance) {
  if (fabs(value - expected) > tolerance) fail_msg("%.6f is not %.6f", value, expected);
}

TEST(Stock_InItsSteadyState_PaysEveryMessage) {
  /* One more micro-batch costs f + b + 2c if every stage has one neighbour, f + b + 4c if one stage has two. */
  for (int32_t p = 2; p <= 4; p += 2) {
    sluice_pipeline_spec_t more = pipeline_of(p, 1, 17, SLUICE_POLICY_DEEPSPEED, 0), less = more;
    less.num_micro_batches = 16;
    sluice_pipeline_times_t times = times_of(&more, 1.0 / 3, 1.0 / 3, 1.0 / 3, 0.25);
    double step = simulate(&more, &times).makespan_s - simulate(&less, &times).makespan_s;
    assert_near(step, p == 2 ? 1.5 : 2, NEXT_TO_NOTHING);
  }
}

static double bubble(int32_t p, int32_t v, int32_t m, int32_t policy) {
  sluice_pipeline_spec_t spec = pipeline_of(p, v, m, policy, 0);
  sluice_pipeline_times_t times = times_of(&spec, 1, 1, 1, 0);
  return simulate(&spec, &times).bubble;
}

TEST(Bubbles_OfPlans_FollowTheirFormulas) {
  for (int32_t p = 1; p <= 8; ++p) {
    for (int32_t m = p; m <= 24; m += p) {
      double work = 3.0 * m, idle = 3.0 * (p - 1);
      assert_near(bubble(p, 1, m, SLUICE_POLICY_1F1B), idle / (work + idle), NEXT_TO_NOTHING);
      assert_near(bubble(p, 1, m, SLUICE_POLICY_GPIPE), idle / (work + idle), NEXT_TO_NOTHING);
      assert_near(bubble(p, 2, m, SLUICE_POLICY_LOOPED), idle / 2 / (work + idle / 2), NEXT_TO_NOTHING);
      if (m >= 2 * p - 1) {
        assert_near(bubble(p, 1, m, SLUICE_POLICY_ZERO_BUBBLE), idle / 3 / (work + idle / 3), NEXT_TO_NOTHING);
      }
    }
  }
}

/* ---- reductions ---- */

/* Seconds of a batch with the reductions of `reduce_s`, by virtual stage. */
static double reduced(const sluice_pipeline_spec_t* given, const double* reduce_s) {
  sluice_pipeline_spec_t spec = *given;
  spec.reduces = 1;
  sluice_pipeline_times_t times = times_of(&spec, 1, 1, 1, 0);
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(&spec); ++c) times.reduce_s[c] = reduce_s[c];
  const sluice_pipeline_result_t result = simulate(&spec, &times);
  for (int32_t s = 0; s < spec.num_stages; ++s) assert_near(result.stages[s].busy_s, 3 * 8, NEXT_TO_NOTHING);
  return result.makespan_s;
}

TEST(Reductions_DuringTheDrain_AreHidden) {
  /* Stage s of 1F1B ends when s backwards of two seconds remain: the last of four stages hides six seconds. */
  sluice_pipeline_spec_t spec = pipeline_of(4, 1, 8, SLUICE_POLICY_1F1B, 0);
  const double batch = reduced(&spec, (double[8]){0});
  assert_near(batch, 3 * 11, NEXT_TO_NOTHING);
  assert_near(reduced(&spec, (double[]){0, 0, 0, 6}), batch, NEXT_TO_NOTHING);
  assert_near(reduced(&spec, (double[]){0, 0, 0, 10}), batch + 4, NEXT_TO_NOTHING);
  assert_near(reduced(&spec, (double[]){5, 5, 5, 5}), batch + 5, NEXT_TO_NOTHING);
  /* With two virtual stages the first half of a stage is reduced while the other half drains; a reduction after the
   * batch would add all eight seconds of a stage. */
  const double halves[] = {4, 4, 4, 4, 4, 4, 4, 4};
  static const struct {
    int32_t policy;
    double shown;
  } shown[] = {{SLUICE_POLICY_LOOPED, 4}, {SLUICE_POLICY_V, 6.5}, {SLUICE_POLICY_BACKWARD_FIRST, 4}};
  for (size_t i = 0; i < sizeof shown / sizeof shown[0]; ++i) {
    spec = pipeline_of(4, 2, 8, shown[i].policy, 0);
    assert_near(reduced(&spec, halves) - reduced(&spec, (double[8]){0}), shown[i].shown, NEXT_TO_NOTHING);
  }
  /* Reductions of one stage run one after the other. */
  spec = pipeline_of(1, 2, 8, SLUICE_POLICY_GPIPE, 0);
  assert_near(reduced(&spec, (double[]){1, 100}), 3 * 8 + 100 - 8 * 1.0 + 1, NEXT_TO_NOTHING);
}

/* ---- invariants of every run ---- */

typedef struct draw_s {
  uint64_t seed;
} draw_t;

/* Multiplies a time by 0.5 to 2.5, always the same factor for an op. */
static double stretched(void* user, const sluice_stage_op_t* op, double begin_s, double seconds) {
  assert_true(begin_s >= 0);
  uint64_t x = ((draw_t*)user)->seed;
  const uint64_t parts[] = {(uint64_t)op->kind, (uint64_t)op->virtual_stage, (uint64_t)op->micro_batch};
  for (size_t i = 0; i < 3; ++i) x = (x ^ parts[i]) * 0x9e3779b97f4a7c15u, x ^= x >> 29;
  return seconds * (0.5 + 2 * (double)(x % 1000) / 1000);
}

static void assert_keeps_rules(const sluice_pipeline_program_t* program, const sluice_pipeline_times_t* times) {
  size_t room = (size_t)program->num_ops * sizeof(double);
  double *begin = malloc(room), *end = malloc(room);
  assert_true(begin != NULL && end != NULL);
  sluice_pipeline_result_t result;
  if (sluice_pipeline_simulate(program, times, sluice_process_allocator(), &result, begin, end) != SLUICE_OK) {
    fail_msg("%s", last_message());
  }
  for (int32_t i = 0; i < program->num_ops; ++i) {
    const sluice_stage_op_t* a = &program->ops[i];
    int is_message = sluice_stage_op_is_message(a->kind);
    assert_true(begin[i] <= end[i]);
    for (int32_t n = 0; n < a->num_needs; ++n) {
      int32_t needed = program->needs[a->first_need + n];
      int is_on_link = is_message || sluice_stage_op_is_message(program->ops[needed].kind);
      if (!times->is_buffered || !is_on_link) assert_true(end[needed] <= begin[i] + NEXT_TO_NOTHING);
    }
    if (is_message && !sluice_stage_op_is_send(a->kind)) assert_true(end[i] >= begin[a->match]);
    for (int32_t j = 0; j < i; ++j) {
      const sluice_stage_op_t* b = &program->ops[j];
      int same_link = is_message && sluice_stage_op_is_send(a->kind) && b->kind == a->kind && b->peer == a->peer;
      int share = a->stage == b->stage && (is_message ? same_link : !sluice_stage_op_is_message(b->kind));
      if (!share) continue;
      assert_true(end[i] <= begin[j] + NEXT_TO_NOTHING || end[j] <= begin[i] + NEXT_TO_NOTHING);
    }
    if (end[i] > result.makespan_s + NEXT_TO_NOTHING) fail_msg("op %d ends after the batch", i);
  }
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(&program->spec); ++c) {
    assert_in_range(result.most_in_flight[c], 0, program->spec.in_flight[c]);
  }
  free(begin);
  free(end);
}

/* Larger pipelines than the checker explores; no drawn times make them wait for ever. */
TEST(Simulation_OfEveryPolicy_KeepsNeedsStagesLinksAndLimits) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    int32_t two = policy == SLUICE_POLICY_LOOPED || policy == SLUICE_POLICY_V || policy == SLUICE_POLICY_BACKWARD_FIRST;
    sluice_pipeline_spec_t spec = pipeline_of(8, two ? 2 : 1, 16, policy, 0);
    sluice_pipeline_program_t* program = program_of(&spec);
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      draw_t draw = {seed};
      sluice_pipeline_times_t times = times_of(&spec, 1, 1, 1, 0.1 * (double)(seed % 4));
      times.is_buffered = seed % 2 == 0 && policy != SLUICE_POLICY_DEEPSPEED;
      times.shares_cards = seed % 3 == 0;
      times.seconds_of = stretched;
      times.user = &draw;
      assert_keeps_rules(program, &times);
    }
    free_program(program);
  }
}

/* ---- single cases ---- */

TEST(Link_WithTwoMessages_CarriesOneAfterTheOther) {
  /* Forwards take 1 and messages 3: the second input arrives at 1 + 3 + 3 with rendezvous and buffered sends. */
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 2, SLUICE_POLICY_FORWARD_ONLY, 2);
  sluice_pipeline_times_t times = times_of(&spec, 1, 0, 0, 3);
  for (times.is_buffered = 0; times.is_buffered < 2; ++times.is_buffered) {
    assert_near(simulate(&spec, &times).makespan_s, 8, NEXT_TO_NOTHING);
  }
}

static double seconds_over(const sluice_pipeline_spec_t* spec, double c, int32_t shares_cards) {
  sluice_pipeline_times_t times = times_of(spec, 0.25, 0.25, 0.25, c);
  times.shares_cards = shares_cards;
  return simulate(spec, &times).makespan_s;
}

TEST(Cards_OfStagesWithOneMessageAtATime_ChangeNothing) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (policy == SLUICE_POLICY_LOOPED || policy == SLUICE_POLICY_V) continue;
    sluice_pipeline_spec_t spec = pipeline_of(2, 1, 8, policy, 0);
    assert_near(seconds_over(&spec, 0.3, 1), seconds_over(&spec, 0.3, 0), NEXT_TO_NOTHING);
  }
  sluice_pipeline_spec_t spec = pipeline_of(5, 1, 8, SLUICE_POLICY_FORWARD_ONLY, 3);
  assert_near(seconds_over(&spec, 0.3, 1), seconds_over(&spec, 0.3, 0), NEXT_TO_NOTHING);
}

TEST(Cards_OfAMiddleStage_CarryBothItsMessages) {
  /* Messages take ten seconds. The card of the middle one of three stages sends 2m messages, each of its two links only
   * m. */
  sluice_pipeline_spec_t spec = pipeline_of(3, 1, 8, SLUICE_POLICY_BACKWARD_FIRST, 8);
  assert_true(seconds_over(&spec, 10, 1) >= 2 * 8 * 10);
  assert_true(seconds_over(&spec, 10, 0) < 2 * 8 * 10);
  /* Passes take no time, and a single micro-batch never shares a card. */
  spec.num_micro_batches = 1;
  sluice_pipeline_times_t times = times_of(&spec, 0, 0, 0, 1);
  times.shares_cards = 1;
  assert_near(simulate(&spec, &times).makespan_s, 4, NEXT_TO_NOTHING);
}

static double stalls_at_two(void* user, const sluice_stage_op_t* op, double begin_s, double seconds) {
  (void)user;
  return sluice_stage_op_is_send(op->kind) && begin_s <= 2 && begin_s + seconds > 2 ? seconds + 5 : seconds;
}

static double is_not_finite(void* user, const sluice_stage_op_t* op, double begin_s, double seconds) {
  (void)user;
  (void)begin_s;
  return op->kind == SLUICE_STAGE_BACKWARD && op->micro_batch == 1 ? NAN : seconds;
}

TEST(Seconds_OfAnOp_MayDependOnItsMoment) {
  /* Forwards take 1; the messages begin at 1 and at 2, end at 1.5 and at 7.5, and one forward follows. */
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 2, SLUICE_POLICY_FORWARD_ONLY, 2);
  sluice_pipeline_times_t times = times_of(&spec, 1, 0, 0, 0.5);
  times.seconds_of = stalls_at_two;
  for (times.shares_cards = 0; times.shares_cards < 2; ++times.shares_cards) {
    assert_near(simulate(&spec, &times).makespan_s, 8.5, NEXT_TO_NOTHING);
  }
  spec = pipeline_of(2, 1, 2, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  sluice_pipeline_program_t* program = program_of(&spec);
  times.seconds_of = is_not_finite;
  sluice_pipeline_result_t result;
  REFUSED(sluice_pipeline_simulate(program, &times, sluice_process_allocator(), &result, NULL, NULL),
          SLUICE_E_INVALID_ARGUMENT, "the time of backward of micro-batch 1");
  free_program(program);
}

TEST(Message_OfBytes_TakesLatencyAndThem) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 1, SLUICE_POLICY_MESSAGE_DRIVEN, 1);
  spec.message_bytes[0] = 1000;
  sluice_pipeline_times_t times = times_of(&spec, 1, 1, 0, 0.25);
  times.s_per_byte[0] = 0.001;
  assert_near(simulate(&spec, &times).makespan_s, 4 + 2 * 1.25, NEXT_TO_NOTHING);
}

TEST(Stock_BufferedSends_HidePartOfWhatRendezvousPays) {
  /* With two stages there is no gain: the first one waits for a gradient before it sends the next input. */
  for (int32_t p = 2; p <= 4; p += 2) {
    sluice_pipeline_spec_t spec = pipeline_of(p, 1, 16, SLUICE_POLICY_DEEPSPEED, 0);
    sluice_pipeline_times_t times = times_of(&spec, 0.5, 0.25, 0.25, 0.25);
    double rendezvous = simulate(&spec, &times).makespan_s;
    times.is_buffered = 1;
    double buffered = simulate(&spec, &times).makespan_s;
    if (p == 2) assert_near(buffered, rendezvous, NEXT_TO_NOTHING);
    if (p == 4) assert_true(buffered < 0.9 * rendezvous);
  }
}

TEST(Simulate_TimeThatIsNone_IsRefused) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 2, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  sluice_pipeline_program_t* program = program_of(&spec);
  const double wrong[] = {-1, NAN, INFINITY};
  for (size_t i = 0; i < 3; ++i) {
    sluice_pipeline_times_t times = times_of(&spec, 1, 1, 1, 0);
    times.weight_s[1] = wrong[i];
    sluice_pipeline_result_t result;
    REFUSED(sluice_pipeline_simulate(program, &times, sluice_process_allocator(), &result, NULL, NULL),
            SLUICE_E_INVALID_ARGUMENT, "virtual stage 1");
  }
  free_program(program);
}

TEST(Simulate_ProgramThatCannotMove_IsInternal) {
  sluice_pipeline_spec_t spec = pipeline_of(2, 1, 2, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  sluice_pipeline_program_t* program = program_of(&spec);
  int32_t send = sluice_pipeline_find(program, SLUICE_STAGE_SEND_GRADIENT, 1, 1);
  int32_t receive = program->ops[send].match;
  program->ops[send].match = program->ops[receive].match = -1;
  sluice_pipeline_times_t times = times_of(&spec, 1, 1, 1, 0);
  sluice_pipeline_result_t result;
  assert_int_equal(sluice_pipeline_simulate(program, &times, sluice_process_allocator(), &result, NULL, NULL),
                   SLUICE_E_INTERNAL);
  free_program(program);
}

TEST(Simulate_EveryFailingAllocation_IsNoMemoryAndLeaksNothing) {
  sluice_pipeline_spec_t spec = pipeline_of(3, 1, 2, SLUICE_POLICY_MESSAGE_DRIVEN, 2);
  sluice_pipeline_program_t* program = program_of(&spec);
  sluice_pipeline_times_t times = times_of(&spec, 1, 1, 1, 0);
  for (int64_t n = 0; n <= 4; ++n) {
    sluice_allocator_t allocator;
    sluice_allocator_init(&allocator, NULL, NULL, NULL);
    allocator.fail_after = n;
    sluice_pipeline_result_t result;
    sluice_status_t status = sluice_pipeline_simulate(program, &times, &allocator, &result, NULL, NULL);
    assert_int_equal(status, n < 4 ? SLUICE_E_NO_MEMORY : SLUICE_OK);
    assert_int_equal(allocator.num_live, 0);
    sluice_allocator_deinit(&allocator);
  }
  free_program(program);
}
