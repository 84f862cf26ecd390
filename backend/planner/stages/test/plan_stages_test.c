// SPDX-License-Identifier: Apache-2.0
/* Contents of plans: errors, the smallest budget, reasons, predictions; plans are deterministic. */
#include <stdint.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/planner/stages/plan_stages.h"
#include "backend/planner/stages/model.h"
#include "backend/planner/stages/test/reference.h"
#include "third_party/bazel/test.h"

static sluice_status_t make(random_problem_t* r) {
  return sluice_stages_plan(&r->problem, sluice_process_allocator(), &r->plan);
}

static sluice_status_t make_counted(random_problem_t* r, uint64_t* steps) {
  const sluice_status_t status = make(r);
  *steps = r->plan.steps;
  return status;
}

static const char* message(void) {
  static sluice_error_info_t info;
  sluice_error_capture(&info);
  return info.message;
}

/* ---- refusals ---- */

static void check_refused(random_problem_t* r, const char* words) {
  assert_int_equal(make(r), SLUICE_E_INVALID_ARGUMENT);
  if (strstr(message(), words) == NULL) fail_msg("\"%s\" does not say \"%s\"", message(), words);
}

TEST(Plan_OfAProblemThatMeansNothing_IsRefusedByName) {
  random_t random = {1};
  random_problem_t r = random_chain(&random, 6, 3);
  r.problem.links = r.links;
  const sluice_stages_problem_t good = r.problem;
#define REFUSE(change, words) \
  do {                        \
    change;                   \
    check_refused(&r, words); \
    r.problem = good;         \
  } while (0)
  REFUSE(r.problem.num_layers = 0, "num_layers is 0");
  REFUSE(r.problem.num_stages = 7, "no stage stays empty");
  REFUSE(r.problem.num_micro_batches = 0, "num_micro_batches is 0");
  REFUSE(r.problem.schedule = 3, "schedule is 3");
  REFUSE(r.problem.method = 4, "method is 4");
  REFUSE(r.problem.in_flight_limit = -1, "in_flight_limit is -1");
  REFUSE(r.problem.weight_versions = 2, "weight_versions is 2");
  REFUSE(r.problem.copy_bytes_per_second = NAN, "copy_bytes_per_second is");
  REFUSE(r.problem.base_bytes = UINT64_MAX, "more than the");
  const int32_t in_flight[3] = {1, 0, 1};
  REFUSE(r.problem.in_flight = in_flight, "in_flight of stage 1 is 0");
  sluice_stages_edge_t backward = {3, 3};
  REFUSE((r.problem.edges = &backward, r.problem.num_edges = 1), "edge 0 is from layer 3 to layer 3");
  sluice_stages_edge_t skip = {0, 2};
  REFUSE((r.problem.edges = &skip, r.problem.num_edges = 1, r.problem.method = SLUICE_STAGES_EXACT),
         "supports only chains");
#undef REFUSE
  r.links[1].bytes_per_second = 0;
  check_refused(&r, "link 1 has 0 bytes per second");
  r.links[1].bytes_per_second = 1;
  r.options[4 * RANDOM_OPTIONS].forward_seconds = -1;
  check_refused(&r, "option 0 of layer 4 takes -1");
  r.options[4 * RANDOM_OPTIONS].forward_seconds = 1;
  r.layers[2].options = &r.options[2 * RANDOM_OPTIONS + SLUICE_STAGES_OFFLOAD], r.layers[2].num_options = 1;
  check_refused(&r, "all options of layer 2 copy");
  random_problem_free(&r);
}

/* ---- the smallest budget ---- */

TEST(Plan_ThatDoesNotFit_NamesTheSmallestBudgetThatDoes) {
  random_t random = {3};
  for (int32_t c = 0; c < 300; ++c) {
    const int32_t stages = 1 + random_index(&random, 4);
    random_problem_t r = random_chain(&random, stages + random_index(&random, 12), stages);
    for (int32_t s = 0; s < stages; ++s) r.budgets[s] = 1;
    r.problem.method = random_index(&random, 4);
    assert_int_equal(make(&r), SLUICE_E_OVER_BUDGET);
    const uint64_t smallest = r.plan.smallest_budget_bytes;
    char words[64];
    snprintf(words, sizeof words, "stage %d, with layers", r.plan.blocking_stage);
    assert_non_null(strstr(message(), words));
    snprintf(words, sizeof words, "takes at least %llu bytes", (unsigned long long)smallest);
    assert_non_null(strstr(message(), words));
    assert_int_equal(r.plan.stages[r.plan.blocking_stage].bytes, smallest);
    assert_int_equal(r.plan.short_bytes, smallest - 1);
    for (int32_t s = 0; s < stages; ++s) r.budgets[s] = smallest;
    assert_int_equal(make(&r), SLUICE_OK);
    for (int32_t s = 0; s < stages; ++s) assert_true(r.plan.stages[s].bytes <= smallest);
    for (int32_t s = 0; s < stages; ++s) r.budgets[s] = smallest - 1;
    assert_int_equal(make(&r), SLUICE_E_OVER_BUDGET);
    random_problem_free(&r);
  }
}

/* ---- predictions and reasons ---- */

static int is_same(double a, double b) { return fabs(a - b) <= 1e-9 * (fabs(a) + fabs(b)); }

static void check_stage(const random_problem_t* r, int32_t stage, int32_t first, int32_t end) {
  const sluice_stages_stage_t* s = &r->plan.stages[stage];
  int32_t options[EXHAUSTIVE_LAYERS];
  uint64_t bytes, parameters = 0;
  for (int32_t i = first; i < end; ++i) {
    options[i - first] = r->plan.choices[i].option;
    parameters += r->layers[i].parameter_bytes;
  }
  assert_true(is_same(exhaustive_turn(&r->problem, stage, first, end, options, &bytes), s->seconds));
  assert_int_equal(bytes, s->bytes);
  assert_int_equal(bytes, s->base_bytes + s->parameter_bytes + s->state_bytes + s->message_bytes + s->resident_bytes +
                              s->held_bytes + s->working_bytes + s->staging_bytes + s->arena_bytes);
  assert_int_equal(s->parameter_bytes, parameters * (r->problem.weight_versions ? (uint64_t)s->in_flight : 1));
  for (int32_t i = first; i < end; ++i) {
    const sluice_stages_choice_t* choice = &r->plan.choices[i];
    options[i - first] = choice->fastest;
    uint64_t other_bytes;
    const double turn = exhaustive_turn(&r->problem, stage, first, end, options, &other_bytes);
    const uint64_t budget = exhaustive_budget(&r->problem, stage);
    switch (choice->reason) {
      case SLUICE_STAGES_FASTEST: assert_int_equal(choice->option, choice->fastest); break;
      case SLUICE_STAGES_FREE:
        assert_int_equal(other_bytes, budget + choice->reason_bytes);
        assert_true(turn >= s->seconds * (1 - 1e-9));
        break;
      case SLUICE_STAGES_SAVES:
        assert_int_equal(other_bytes, budget + choice->reason_bytes);
        assert_true(fabs(s->seconds - turn - choice->reason_seconds) <= 1e-9 * s->seconds && turn < s->seconds);
        break;
      case SLUICE_STAGES_UNBURDENS:
        assert_true(other_bytes <= budget);
        assert_true(fabs(turn - s->seconds - choice->reason_seconds) <= 1e-9 * turn);
        break;
      case SLUICE_STAGES_NO_TIME: assert_true(turn == INFINITY); break;
      default: fail_msg("reason %d of a plan that fits", choice->reason);
    }
    options[i - first] = choice->option;
  }
}

typedef struct live_s {
  uint64_t held, most;
} live_t;

/* One micro-batch through the layers, forward (+1) or backward (-1). */
static void pass(const random_problem_t* r, int32_t first, int32_t end, int direction, live_t* live) {
  for (int32_t n = 0; n < end - first; ++n) {
    const int32_t i = direction > 0 ? first + n : end - 1 - n;
    const sluice_stages_option_t* option = &r->problem.layers[i].options[r->plan.choices[i].option];
    if (direction > 0) live->held += option->held_bytes;
    if (live->held + option->working_bytes > live->most) live->most = live->held + option->working_bytes;
    if (direction < 0) live->held -= option->held_bytes;
  }
}

/* Micro-batches of 1F1B, layer by layer. */
static void check_peak(const random_problem_t* r, int32_t stage, int32_t first, int32_t end) {
  const sluice_stages_stage_t* s = &r->plan.stages[stage];
  live_t live = {0, 0};
  for (int32_t i = 0; i < s->in_flight; ++i) pass(r, first, end, 1, &live);
  for (int32_t i = 0; i < 3; ++i) pass(r, first, end, -1, &live), pass(r, first, end, 1, &live);
  for (int32_t i = 0; i < s->in_flight; ++i) pass(r, first, end, -1, &live);
  assert_int_equal(live.held, 0);
  assert_int_equal(s->peak_bytes, s->bytes - s->held_bytes - s->working_bytes + live.most);
  assert_true(s->peak_bytes <= s->bytes);
}

static void check_cuts(const random_problem_t* r, int32_t stage) {
  const sluice_stages_stage_t* s = &r->plan.stages[stage];
  const sluice_stages_other_cut_t* cuts[] = {&s->begins_earlier, &s->begins_later};
  for (int i = 0; i < 2; ++i) {
    /* No other cut of an optimal plan is better. */
    assert_true(cuts[i]->slowest_seconds >= r->plan.slowest_seconds * (1 - 1e-9));
    assert_true(cuts[i]->short_bytes == 0 || cuts[i]->slowest_seconds == INFINITY);
    assert_true(cuts[i]->layer >= 0 || cuts[i]->slowest_seconds == INFINITY);
    if (stage == 0) assert_int_equal(cuts[i]->layer, -1);
    if (cuts[i]->layer >= 0) assert_int_equal(r->plan.choices[cuts[i]->layer].stage, stage - 1 + i);
  }
}

TEST(Plan_OfAnyChain_PredictsAndReasonsAsTheFormulasDo) {
  random_t random = {4};
  int32_t reasons[6] = {0};
  for (int32_t c = 0; c < 500; ++c) {
    const int32_t stages = 1 + random_index(&random, EXHAUSTIVE_STAGES);
    random_problem_t r = random_chain(&random, stages + random_index(&random, EXHAUSTIVE_LAYERS + 1 - stages), stages);
    if (make(&r) == SLUICE_OK) {
      for (int32_t s = 0, first = 0, end; s < stages; ++s, first = end) {
        for (end = first; end < r.problem.num_layers && r.plan.choices[end].stage == s;) ++end;
        check_stage(&r, s, first, end);
        check_peak(&r, s, first, end);
        check_cuts(&r, s);
      }
      for (int32_t i = 0; i < r.problem.num_layers; ++i) ++reasons[r.plan.choices[i].reason];
    }
    random_problem_free(&r);
  }
  printf("fastest %d, free %d, saves %d, unburdens %d, no time %d\n", reasons[0], reasons[1], reasons[2], reasons[3],
         reasons[4]);
  assert_true(reasons[SLUICE_STAGES_FASTEST] > 100 && reasons[SLUICE_STAGES_FREE] > 100);
  assert_true(reasons[SLUICE_STAGES_SAVES] > 100);
}

TEST(Plan_MadeTwice_IsTheSameToTheByte) {
  random_t random = {5};
  for (int32_t c = 0; c < 40; ++c) {
    random_problem_t r = c % 2 == 0 ? random_chain(&random, 40, 4) : random_nests(&random, 40, 4);
    const size_t choices = 40 * sizeof *r.plan.choices, stages = 4 * sizeof *r.plan.stages;
    void *first = malloc(choices), *second = malloc(stages);
    const sluice_status_t status = make(&r);
    memcpy(first, r.plan.choices, choices), memcpy(second, r.plan.stages, stages);
    memset(r.plan.choices, 0xff, choices), memset(r.plan.stages, 0xff, stages);
    assert_int_equal(make(&r), status);
    assert_memory_equal(first, r.plan.choices, choices);
    assert_memory_equal(second, r.plan.stages, stages);
    free(first), free(second);
    random_problem_free(&r);
  }
}

/* ---- what plans are for ---- */

enum { LAYERS = 32 };

typedef struct equal_layers_s {
  sluice_stages_option_t options[3];
  sluice_stages_layer_t layers[LAYERS];
  uint64_t budgets[LAYERS];
  sluice_stages_choice_t choices[LAYERS];
  sluice_stages_stage_t stages[LAYERS];
  sluice_stages_problem_t problem;
  sluice_stages_plan_t plan;
} equal_layers_t;

/* Layers of 1 + 2 seconds and 100 bytes, 10 of them their input. */
static void make_equal_layers(equal_layers_t* a, int32_t num_stages) {
  const sluice_stages_profile_t profile = {1, 2, 1, 100, 10, 0};
  *a = (equal_layers_t){.problem = {.layers = a->layers, .budget_bytes = a->budgets, .num_layers = LAYERS},
                        .plan = {.choices = a->choices, .stages = a->stages}};
  sluice_stages_options_of_profile(&profile, a->options);
  for (int32_t i = 0; i < LAYERS; ++i) a->layers[i] = (sluice_stages_layer_t){a->options, 10, 30, 10, 3, 0};
  a->problem.num_stages = num_stages, a->problem.num_micro_batches = 8;
}

static sluice_status_t plan_equal_layers(equal_layers_t* a, uint64_t budget) {
  for (int32_t s = 0; s < a->problem.num_stages; ++s) a->budgets[s] = budget;
  return sluice_stages_plan(&a->problem, sluice_process_allocator(), &a->plan);
}

static int32_t count_kind(const equal_layers_t* a, int32_t stage, int32_t kind) {
  int32_t count = 0;
  for (int32_t i = 0; i < LAYERS; ++i) {
    count += a->choices[i].stage == stage && a->options[a->choices[i].option].kind == kind;
  }
  return count;
}

/* 1F1B: stage 0 of 4 holds four micro-batches, stage 3 one, so the first stages are short of memory. Without copies
 * they recompute and pass layers on; with copies they offload, which is free. */
TEST(Plan_OfEqualLayers_RelievesTheFrontStages) {
  equal_layers_t a;
  make_equal_layers(&a, 4);
  assert_int_equal(plan_equal_layers(&a, 1600), SLUICE_OK);
  assert_true(count_kind(&a, 0, SLUICE_STAGES_RECOMPUTE) > 0);
  assert_int_equal(count_kind(&a, 3, SLUICE_STAGES_RECOMPUTE), 0);
  assert_true(a.stages[0].num_layers < a.stages[3].num_layers);
  assert_true(a.plan.slowest_seconds == 29);
  a.problem.copy_bytes_per_second = 100;
  assert_int_equal(plan_equal_layers(&a, 1600), SLUICE_OK);
  assert_true(count_kind(&a, 0, SLUICE_STAGES_OFFLOAD) > 0);
  assert_true(a.plan.slowest_seconds == 24);
  assert_true(a.plan.step_seconds == 96 + 7 * 24);
}

TEST(Plan_InSentences_NamesEveryStageAndLayerWithItsNumbers) {
  equal_layers_t a;
  make_equal_layers(&a, 4);
  assert_int_equal(plan_equal_layers(&a, 1600), SLUICE_OK);
  sluice_text_t length = sluice_text(NULL, 0);
  sluice_stages_explain(&a.problem, &a.plan, NULL, &length);
  char* words = malloc(length.used + 1);
  sluice_text_t text = sluice_text(words, length.used + 1);
  sluice_stages_explain(&a.problem, &a.plan, NULL, &text);
  int32_t lines = 0;
  for (const char* c = words; *c != 0; ++c) lines += *c == '\n';
  assert_int_equal(lines, 4 + LAYERS);
  /* Seven layers, five of them recomputed: 7 * 40 + 4 * 10 + 2 * 400 + 5 * 40 + 90 bytes; one more kept is 4 * 90. */
  assert_non_null(strstr(words, "stage 0: 7 layers, 26 s (compute 26, messages 0, copies 0), 1410 bytes of 1600\n"));
  assert_non_null(strstr(words,
                         "recompute (option 1): with keep (option 0) the stage is 170 bytes over its budget; "
                         "this costs 1 s"));
  assert_non_null(strstr(words, "keep (option 0): nothing is faster, and it fits"));
  assert_non_null(strstr(words, "29 s, the slowest"));
  free(words);
}

/* Numbers of steps do not depend on the machine's load: 100 million take about a second. A refusal takes no more steps
 * than a plan, whether budgets are far too small or one byte short. */
TEST(Plan_OfManyLayers_TakesFewSteps) {
  const struct {
    int32_t layers, stages, count;
    uint64_t most_steps, most_refused; /* of a plan, even one that just fits; of a refusal */
  } sizes[] = {{128, 8, 10, 8000000, 1500000}, {1024, 64, 3, 300000000, 120000000}};
  for (int i = 0; i < 2; ++i) {
    random_t random = {6};
    for (int32_t c = 0; c < sizes[i].count; ++c) {
      random_problem_t r = random_chain(&random, sizes[i].layers, sizes[i].stages);
      uint64_t steps[4];
      const sluice_status_t status = make_counted(&r, &steps[0]);
      assert_true(status == SLUICE_OK || status == SLUICE_E_OVER_BUDGET);
      for (int32_t s = 0; s < sizes[i].stages; ++s) r.budgets[s] = 1;
      assert_int_equal(make_counted(&r, &steps[1]), SLUICE_E_OVER_BUDGET);
      const uint64_t below = r.plan.smallest_budget_bytes - 1;
      for (int32_t s = 0; s < sizes[i].stages; ++s) r.budgets[s] = below;
      assert_int_equal(make_counted(&r, &steps[2]), SLUICE_E_OVER_BUDGET);
      assert_int_equal(r.plan.smallest_budget_bytes, below + 1);
      for (int32_t s = 0; s < sizes[i].stages; ++s) r.budgets[s] = below + 1;
      assert_int_equal(make_counted(&r, &steps[3]), SLUICE_OK);
      printf("%d layers on %d stages: %" PRIu64 " steps, status %d; refused in %" PRIu64 " and %" PRIu64
             "; just fits in %" PRIu64 "\n",
             sizes[i].layers, sizes[i].stages, steps[0], status, steps[1], steps[2], steps[3]);
      for (int s = 0; s < 4; ++s)
        assert_in_range(steps[s], 1, s == 0 || s == 3 ? sizes[i].most_steps : sizes[i].most_refused);
      random_problem_free(&r);
    }
  }
}
