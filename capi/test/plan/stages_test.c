// SPDX-License-Identifier: Apache-2.0
/* The planner of stages through its public calls: plain layers, MoE layers under one budget, errors, and the memory of
 * a real context under a plan. */
#include <math.h>

#include "backend/base/alloc.h"
#include "capi/test/plan/planner_rig.h"
#include "capi/test/rig/refusals.h"
#include "sluice/stages.h"
#include "third_party/bazel/test.h"

enum { MOST = 8, TEXT = 8192 };

/* A problem, and memory for its result. */
typedef struct scene_s {
  sluice_planner_layer_t layer[MOST];
  const sluice_planner_layer_t* layers[MOST];
  uint64_t budgets[MOST];
  sluice_planner_problem_t problem;
  sluice_stages_choice_t choices[MOST];
  sluice_stages_stage_t stages[MOST];
  sluice_planner_candidate_t moe[MOST];
  char text[TEXT];
  sluice_planner_result_t result;
} scene_t;

static void open_scene(scene_t* s, int32_t num_layers, int32_t num_stages) {
  memset(s, 0, sizeof *s);
  for (int32_t i = 0; i < num_layers; ++i) {
    sluice_planner_layer_init(&s->layer[i], sizeof s->layer[i]);
    s->layers[i] = &s->layer[i];
  }
  sluice_planner_problem_init(&s->problem, sizeof s->problem);
  s->problem.layers = s->layers, s->problem.num_layers = num_layers, s->problem.num_stages = num_stages;
  sluice_planner_result_init(&s->result, sizeof s->result);
  s->result.choices = s->choices, s->result.stages = s->stages, s->result.moe = s->moe;
  s->result.text = s->text, s->result.text_room = sizeof s->text;
}

/* Forward 1 s, backward 2 s, recomputation 1 s; 100 bytes of activations, of which 10 are the input. */
static void open_plain(scene_t* s, int32_t num_layers, int32_t num_stages) {
  open_scene(s, num_layers, num_stages);
  for (int32_t i = 0; i < num_layers; ++i) {
    sluice_planner_layer_t* l = &s->layer[i];
    l->forward_seconds = 1, l->backward_seconds = 2, l->recompute_seconds = 1;
    l->activation_bytes = 100, l->checkpoint_bytes = 10, l->output_bytes = 10;
    l->parameter_bytes = 5, l->state_bytes = 15;
  }
}

static sluice_status_t plan(scene_t* s, uint64_t budget) {
  for (int32_t i = 0; i < s->problem.num_stages; ++i) s->budgets[i] = budget;
  s->problem.budget_bytes = s->budgets;
  return sluice_planner_stages(&s->problem, &s->result);
}

/* ---- plain layers ---- */

TEST(Stages_OfPlainLayers_KeepWhatFitsAndSayWhyNot) {
  scene_t s;
  open_plain(&s, 4, 1);
  WORKS(plan(&s, 0));
  assert_true(s.result.step_seconds == 12 && s.result.is_optimal == 1 && s.result.blocking_stage == -1);
  assert_int_equal(s.stages[0].bytes, 4 * 20 + 4 * 100);
  assert_int_equal(s.stages[0].peak_bytes, s.stages[0].bytes);
  for (int32_t i = 0; i < 4; ++i) {
    assert_int_equal(s.choices[i].kind, SLUICE_STAGES_KEEP);
    assert_int_equal(s.choices[i].reason, SLUICE_STAGES_FASTEST);
  }
  /* Two layers keep, two recompute: 80 + 2 * 100 + 2 * 10, and 90 bytes that one recomputed layer has while it runs. */
  WORKS(plan(&s, 390));
  int32_t again = 0;
  for (int32_t i = 0; i < 4; ++i) {
    again += s.choices[i].option == SLUICE_STAGES_RECOMPUTE;
    assert_int_equal(s.choices[i].option, s.choices[i].kind);
    if (s.choices[i].kind == SLUICE_STAGES_KEEP) continue;
    assert_int_equal(s.choices[i].reason, SLUICE_STAGES_SAVES);
    assert_int_equal(s.choices[i].fastest, SLUICE_STAGES_KEEP);
    assert_int_equal(s.choices[i].reason_bytes, 90);
    assert_true(s.choices[i].reason_seconds == 1);
  }
  assert_int_equal(again, 2);
  assert_int_equal(s.stages[0].bytes, 390);
  assert_true(s.result.slowest_seconds == 14);
  assert_non_null(strstr(s.text, "stage 0: 4 layers, 14 s, the slowest"));
  assert_non_null(strstr(s.text, ": recompute: with keep the stage is 90 bytes over its budget; this costs 1 s\n"));
  assert_int_equal(s.result.text_bytes, strlen(s.text) + 1);
  for (int32_t i = 0; i < 4; ++i) assert_int_equal(s.moe[i].choice.num_chunks, 0);
}

/* Offloaded activations exist while their layer runs and once more in flight: offloading one of three saves nothing. */
TEST(Stages_LayersThatMayNot_AreKept) {
  scene_t s;
  open_plain(&s, 4, 1);
  s.problem.copy_bytes_per_second = 1e9;
  for (int32_t i = 0; i < 4; ++i) s.layer[i].may_recompute = 0;
  WORKS(plan(&s, 80 + 100 + 2 * 100));
  for (int32_t i = 0; i < 3; ++i) assert_int_equal(s.choices[i].option, SLUICE_STAGES_OFFLOAD);
  assert_int_equal(s.choices[3].option, SLUICE_STAGES_KEEP);
  assert_int_equal(s.stages[0].host_bytes, 300);
  s.layer[2].may_offload = 0;
  REFUSED(plan(&s, 80 + 100 + 2 * 100), SLUICE_E_OVER_BUDGET, "stage 0");
  for (int32_t i = 0; i < 4; ++i) s.layer[i].may_recompute = 1, s.layer[i].may_offload = 0;
  WORKS(plan(&s, 80 + 100 + 3 * 10 + 90));
  s.layer[1].may_recompute = 0;
  WORKS(plan(&s, 80 + 100 + 3 * 10 + 90));
  assert_int_equal(s.choices[1].option, SLUICE_STAGES_KEEP);
  s.layer[3].may_recompute = 0;
  REFUSED(plan(&s, 80 + 100 + 3 * 10 + 90), SLUICE_E_OVER_BUDGET, "stage 0");
}

TEST(Stages_OwnOptions_AreTakenByTheirNumber) {
  scene_t s;
  open_plain(&s, 3, 1);
  const sluice_stages_option_t own[] = {
      {.forward_seconds = 1, .backward_seconds = 2, .held_bytes = 100, .arena_bytes = 50, .kind = SLUICE_STAGES_KEEP},
      {.forward_seconds = 2, .backward_seconds = 3, .held_bytes = 20, .arena_bytes = 40, .kind = SLUICE_STAGES_MIXED}};
  for (int32_t i = 0; i < 2; ++i) {
    sluice_planner_layer_init(&s.layer[i], sizeof s.layer[i]);
    s.layer[i].options = own, s.layer[i].num_options = 2;
  }
  WORKS(plan(&s, 0));
  assert_int_equal(s.stages[0].arena_bytes, 50); /* both layers share one arena */
  assert_int_equal(s.stages[0].bytes, 20 + 100 + 2 * 100 + 50);
  WORKS(plan(&s, 20 + 100 + 100 + 20 + 50));
  assert_int_equal(s.choices[0].option + s.choices[1].option, 1);
  assert_non_null(strstr(s.text, "mixed (option 1): with keep (option 0) the stage is 80 bytes over"));
  s.result.text = NULL, s.result.text_room = 0;
  const uint64_t whole = s.result.text_bytes;
  WORKS(sluice_planner_stages(&s.problem, &s.result));
  assert_int_equal(s.result.text_bytes, whole);
}

/* ---- stages given by the caller ---- */

static sluice_status_t price(scene_t* s, uint64_t budget, const int32_t* stages, const int32_t* options) {
  for (int32_t i = 0; i < s->problem.num_layers; ++i) {
    s->choices[i].stage = stages[i], s->choices[i].option = options == NULL ? -1 : options[i];
  }
  for (int32_t i = 0; i < s->problem.num_stages; ++i) s->budgets[i] = budget;
  s->problem.budget_bytes = s->budgets;
  return sluice_planner_price_stages(&s->problem, &s->result);
}

TEST(Price_OfAPlan_IsWhatThePlanSays) {
  scene_t s, planned;
  open_plain(&planned, 6, 3);
  planned.problem.num_micro_batches = 4;
  planned.layer[4].may_recompute = 0; /* so that its offload is the second of two options */
  planned.problem.copy_bytes_per_second = 1e9;
  WORKS(plan(&planned, 300));
  s = planned;
  s.problem.layers = s.layers;
  for (int32_t i = 0; i < 6; ++i) s.layers[i] = &s.layer[i];
  s.result.choices = s.choices, s.result.stages = s.stages, s.result.moe = s.moe, s.result.text = s.text;
  int32_t stages[6], options[6];
  for (int32_t i = 0; i < 6; ++i) stages[i] = planned.choices[i].stage, options[i] = planned.choices[i].option;
  for (int32_t is_open = 0; is_open < 2; ++is_open) {
    memset(s.stages, 0xa5, sizeof s.stages);
    s.result.slowest_seconds = s.result.step_seconds = -1;
    WORKS(price(&s, 300, stages, is_open ? NULL : options));
    assert_memory_equal(s.choices, planned.choices, sizeof s.choices);
    for (int32_t i = 0; i < 3; ++i) {
      assert_true(s.stages[i].bytes == planned.stages[i].bytes && s.stages[i].bytes <= 300);
      assert_true(s.stages[i].seconds == planned.stages[i].seconds);
    }
    assert_true(s.result.slowest_seconds == planned.result.slowest_seconds);
    assert_true(s.result.step_seconds == planned.result.step_seconds);
  }
}

TEST(Price_OfStagesThatAreGiven_StaysWithThem) {
  scene_t s;
  open_plain(&s, 4, 2);
  static const int32_t uneven[] = {0, 0, 0, 1}, mixed[] = {1, 0, 1, 0}, kept[] = {0, 0, 0, 0};
  WORKS(price(&s, 0, uneven, mixed));
  assert_true(s.stages[0].seconds == 11 && s.stages[1].seconds == 3 && s.result.slowest_stage == 0);
  assert_int_equal(s.stages[0].bytes, 3 * 20 + 10 + 120 + 90); /* a message, held bytes, and one recomputed layer */
  assert_int_equal(s.choices[0].reason, SLUICE_STAGES_UNBURDENS);
  REFUSED(price(&s, 279, uneven, mixed), SLUICE_E_OVER_BUDGET,
          "this partition of 4 layers over 2 stages does not fit: stage 0,");
  assert_true(s.result.blocking_stage == 0 && s.result.smallest_budget_bytes == 280 && s.result.short_bytes == 1);
  REFUSED(price(&s, 300, uneven, kept), SLUICE_E_OVER_BUDGET, "takes at least 370 bytes");
  WORKS(price(&s, 300, uneven, NULL)); /* without options the planner chooses */
  assert_true(s.stages[0].seconds == 11 && s.stages[0].bytes == 280);
  REFUSED(price(&s, 189, uneven, NULL), SLUICE_E_OVER_BUDGET, "takes at least 190 bytes");
}

TEST(Price_BadStages_AreRefusedByNameAndChangeNothing) {
  static const struct {
    int32_t stages[4], options[4], may_recompute;
    const char* named;
  } cases[] = {
      {{0, 0, 1, 2}, {0, 0, 0, 0}, 1, "layer 3 is on stage 2, but there are 2 stages"},
      {{0, -1, 1, 1}, {0, 0, 0, 0}, 1, "layer 1 is on stage -1"},
      {{0, 1, 0, 1}, {0, 0, 0, 0}, 1, "layer 2 on stage 0 reads layer 1, which is on the later stage 1"},
      {{0, 0, 0, 0}, {0, 0, 0, 0}, 1, "stage 1 has no layer"},
      {{0, 0, 1, 1}, {0, 2, -1, 0}, 1, "layer 2 has option -1 of 3"},
      {{0, 0, 1, 1}, {-1, 0, -1, -1}, 1, "layer 1 has option 0 of 3: give one of each layer, or -1 in all"},
      {{0, 0, 1, 1}, {0, 0, 3, 0}, 1, "layer 2: option is 3"},
      {{0, 0, 1, 1}, {2, 0, 0, 1}, 0, "layer 3: option is 1, which is not one of the layer's 2 options"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    scene_t s;
    open_plain(&s, 4, 2);
    s.problem.copy_bytes_per_second = 1e9;
    for (int32_t l = 0; l < 4; ++l) s.layer[l].may_recompute = cases[i].may_recompute;
    s.result.slowest_seconds = 7;
    REFUSED(price(&s, 0, cases[i].stages, cases[i].options), SLUICE_E_INVALID_ARGUMENT, cases[i].named);
    for (int32_t l = 0; l < 4; ++l) {
      assert_true(s.choices[l].stage == cases[i].stages[l] && s.choices[l].option == cases[i].options[l]);
    }
    assert_true(s.result.slowest_seconds == 7);
  }
}

/* ---- MoE layers ---- */

static void open_moe(scene_t* s, const sluice_planner_workload_t* work, int32_t count) {
  open_scene(s, count, 1);
  for (int32_t i = 0; i < count; ++i) s->layer[i].planner = planner, s->layer[i].moe = work;
}

/* The fewest bytes in which one such layer can keep all of its rows. */
static uint64_t keeps_alone(sluice_planner_workload_t work) {
  static sluice_planner_candidate_t list[512];
  const sluice_planner_choice_t keep = {0, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_WGRAD_ADAPTIVE};
  int32_t count = 0;
  uint64_t least = UINT64_MAX;
  work.memory_budget = 1;
  REFUSED(sluice_planner_choose(planner, &work, &keep, list, 512, &count, NULL), SLUICE_E_OVER_BUDGET, "budget");
  for (int32_t i = 0; i < count; ++i) least = list[i].total_bytes < least ? list[i].total_bytes : least;
  return least;
}

static int is_kept(const sluice_planner_candidate_t* c) {
  return c->choice.restore_input == SLUICE_RESTORE_KEEP && c->choice.restore_pre_activation == SLUICE_RESTORE_KEEP;
}

/* The planner of a single layer predicts the same for each layer's choice, within the layer's share. */
static void check_shares(const scene_t* s, sluice_planner_workload_t work) {
  uint64_t outside_arena = 0;
  for (int32_t i = 0; i < s->problem.num_layers; ++i) {
    const sluice_planner_candidate_t* c = &s->moe[i];
    work.memory_budget = c->total_bytes;
    work.max_outstanding = s->stages[0].in_flight;
    const sluice_planner_prediction_t p = predict(planner, &work, c->choice);
    assert_int_equal(p.total_bytes, c->total_bytes);
    assert_true(p.fits == 1 && fabs(p.forward_seconds - c->forward_seconds) <= 1e-12);
    assert_true(fabs(p.backward_seconds - c->backward_seconds) <= 1e-12);
    outside_arena += p.total_bytes - p.slot_bytes - p.header_bytes - p.gemm_bytes;
  }
  assert_true(s->stages[0].bytes < outside_arena + s->stages[0].arena_bytes + 1);
}

TEST(Stages_ThreeMoeLayers_FitABudgetThatNoneOfThemCouldKeepAlone) {
  const sluice_planner_workload_t work = new_workload();
  const uint64_t alone = keeps_alone(work);
  scene_t s;
  open_moe(&s, &work, 3);
  WORKS(plan(&s, alone - 1));
  assert_true(s.stages[0].bytes < alone);
  for (int32_t i = 0; i < 3; ++i) {
    assert_false(is_kept(&s.moe[i]));
    assert_int_equal(s.choices[i].reason, SLUICE_STAGES_SAVES);
    assert_true(s.moe[i].slower_by > 0);
  }
  assert_non_null(strstr(s.text, "  layer 0: n "));
  check_shares(&s, work);
}

TEST(Stages_MoeLayers_TenBudgetsAreKeptAndMoreIsNeverSlower) {
  const sluice_planner_workload_t work = new_workload();
  scene_t s;
  open_moe(&s, &work, 3);
  for (int32_t in_flight = 1; in_flight <= 2; ++in_flight) {
    s.problem.in_flight = &in_flight;
    REFUSED(plan(&s, 1), SLUICE_E_OVER_BUDGET, "stage 0, with layers 0 to 2");
    const uint64_t least = s.result.smallest_budget_bytes;
    WORKS(plan(&s, 0));
    const uint64_t most = s.stages[0].bytes;
    const double fastest = s.result.slowest_seconds;
    double before = INFINITY;
    int32_t faster = 0;
    for (uint64_t b = 0; b < 10; ++b) {
      const uint64_t budget = least + (most - least) * b / 9;
      WORKS(plan(&s, budget));
      assert_true(s.stages[0].bytes <= budget && s.result.slowest_seconds <= before);
      faster += s.result.slowest_seconds < before;
      before = s.result.slowest_seconds;
      check_shares(&s, work);
    }
    assert_true(before == fastest && faster >= 5);
    REFUSED(plan(&s, least - 1), SLUICE_E_OVER_BUDGET, "takes at least");
  }
}

TEST(Stages_MoeAndPlainLayers_ShareOneBudget) {
  const sluice_planner_workload_t work = new_workload();
  scene_t s;
  open_moe(&s, &work, 4);
  for (int32_t i = 0; i < 4; i += 2) { /* layers are attention, MoE, attention, MoE */
    sluice_planner_layer_init(&s.layer[i], sizeof s.layer[i]);
    s.layer[i].forward_seconds = 1e-3, s.layer[i].backward_seconds = 2e-3, s.layer[i].recompute_seconds = 1e-3;
    s.layer[i].activation_bytes = 24 << 20, s.layer[i].checkpoint_bytes = 2 << 20, s.layer[i].output_bytes = 2 << 20;
  }
  s.layer[1].forward_seconds = 1e-4, s.layer[1].activation_bytes = 3 << 20; /* the gate of this layer */
  s.problem.num_stages = 2, s.problem.num_micro_batches = 4;
  WORKS(plan(&s, 0));
  const double fastest = s.result.slowest_seconds;
  const uint64_t most = s.stages[0].bytes > s.stages[1].bytes ? s.stages[0].bytes : s.stages[1].bytes;
  assert_int_equal(s.choices[0].option, SLUICE_STAGES_KEEP);
  assert_true(s.moe[1].forward_seconds + 1e-4 + 1e-3 < s.stages[0].compute_seconds);
  WORKS(plan(&s, most * 2 / 3));
  assert_true(s.result.slowest_seconds > fastest);
  assert_true(s.stages[0].bytes <= most * 2 / 3 && s.stages[1].bytes <= most * 2 / 3);
  assert_int_equal(s.moe[0].choice.num_chunks, 0);
  assert_true(s.moe[1].choice.num_chunks > 0 && s.moe[3].choice.num_chunks > 0);
}

/* ---- a real context ---- */

enum { REAL = 3 };

static void use_choice(sluice_moe_t* moe, int64_t num_tokens, const sluice_planner_candidate_t* c) {
  DEFAULTS(sluice_plan_config, config);
  sluice_plan_t* made = NULL;
  config.max_tokens = num_tokens, config.num_chunks = c->choice.num_chunks;
  config.restore_input = c->choice.restore_input, config.restore_pre_activation = c->choice.restore_pre_activation;
  config.wgrad_mode = c->choice.wgrad_mode;
  WORKS(sluice_plan_create(moe, &config, &made));
  WORKS(sluice_moe_use_plan(moe, made));
  sluice_plan_destroy(made);
}

/* Three layers of one context take no more than planned, from the smallest budget to the largest. */
TEST(Stages_PlanOfMoeLayers_IsNotExceededByAContext) {
  sluice_planner_workload_t work = new_workload();
  work.model_width = 64, work.hidden_width = 128, work.num_tokens = 512, work.num_experts = 4, work.world_size = 1;
  work.gated = SLUICE_GATED_HALVES;
  scene_t s;
  open_moe(&s, &work, REAL);
  REFUSED(plan(&s, 1), SLUICE_E_OVER_BUDGET, "raise every budget by");
  assert_non_null(strstr(s.text, "the stage does not fit"));
  const uint64_t least = s.result.smallest_budget_bytes;
  WORKS(plan(&s, 0));
  const uint64_t most = s.stages[0].bytes;
  for (uint64_t b = 0; b < 5; ++b) {
    WORKS(plan(&s, least + (most - least) * b / 4));
    rig_t rig;
    sluice_moe_t* layers[REAL];
    sluice_step_t* steps[REAL];
    const sluice_context_config_t context = own_rig_context(0, 0);
    sluice_moe_config_t layer = rig_config();
    layer.model_width = 64, layer.hidden_width = 128, layer.num_chunks = 0, layer.bias = 0;
    layer.gated = SLUICE_GATED_HALVES;
    own_rig_open(&rig, &context, &layer);
    rig.num_tokens = work.num_tokens;
    rig_reset(&rig);
    layers[0] = rig.moe;
    for (int32_t i = 1; i < REAL; ++i) WORKS(sluice_moe_create(rig.context, &rig.config, &layers[i]));
    for (int32_t i = 0; i < REAL; ++i) {
      rig.moe = layers[i];
      use_choice(rig.moe, work.num_tokens, &s.moe[i]);
      WORKS(rig_forward(&rig, &steps[i]));
    }
    for (int32_t i = REAL - 1; i >= 0; --i) {
      rig.moe = layers[i];
      WORKS(rig_backward(&rig, steps[i]));
      sluice_step_drop(steps[i]);
    }
    const uint64_t peak = own_rig_stats(&rig).peak_bytes;
    const uint64_t planned = s.stages[0].bytes - (8u << 20); /* GEMMs "ref" do not borrow their planned memory */
    printf("budget %llu: %llu of %llu bytes\n", (unsigned long long)b, (unsigned long long)peak,
           (unsigned long long)planned);
    assert_true(peak <= planned);
    if (b > 0) assert_true(peak > planned / 20 * 19); /* the leanest has many chunks, whose orders count per layer */
    for (int32_t i = 1; i < REAL; ++i) sluice_moe_destroy(layers[i]);
    own_rig_close(&rig);
  }
}

/* ---- refusals ---- */

TEST(Stages_BadProblems_AreRefusedByNameAndChangeNothing) {
  sluice_planner_workload_t work = new_workload();
  const sluice_planner_workload_t good_work = work;
  static scene_t s, good;
  open_plain(&s, 4, 2);
  good = s;
#define LAYER(change, text)                                         \
  do {                                                              \
    sluice_planner_layer_t* l = &s.layer[2];                        \
    change;                                                         \
    REFUSED(plan(&s, 0), BAD, text);                                \
    s.layer[2] = good.layer[2], work = good_work;                   \
    assert_memory_equal(s.choices, good.choices, sizeof s.choices); \
  } while (0)
  LAYER(l->forward_seconds = -1, "layer 2: forward_seconds is -1");
  LAYER(l->backward_seconds = NAN, "layer 2: backward_seconds is nan");
  LAYER(l->recompute_seconds = INFINITY, "layer 2: recompute_seconds is inf");
  LAYER(l->activation_bytes = UINT64_MAX, "layer 2: activation_bytes is");
  LAYER(l->checkpoint_bytes = 101, "layer 2: checkpoint_bytes is 101 and activation_bytes 100");
  LAYER(l->may_recompute = 2, "layer 2: may_recompute is 2");
  LAYER(l->may_offload = -1, "may_offload -1");
  LAYER(l->reserved = 1, "layer 2: reserved is 1");
  LAYER(l->planner = planner, "layer 2: planner is set without moe");
  LAYER(l->moe = &work, "layer 2: moe is set without planner");
  LAYER(l->num_options = 1, "layer 2: num_options is 1 with options NULL");
  LAYER((l->moe = &work, l->planner = planner), "layer 2: recompute_seconds is 1 and checkpoint_bytes 10; with moe");
#define MOE(change, text) \
  LAYER((sluice_planner_layer_init(l, sizeof *l), l->moe = &work, l->planner = planner, (void)(change)), text)
  MOE(work.model_width = 0, "layer 2: workload: model_width is 0");
  MOE(work.memory_budget = 5, "layer 2: workload: memory_budget, host_memory_budget");
  MOE(work.max_outstanding = 2, "max_outstanding is 1");
  const sluice_planner_choice_t unknown = {300, 0, 0, 0}, again = {0, SLUICE_RESTORE_REDISPATCH, -1, -1};
  MOE(l->wanted = &unknown, "layer 2: choice: num_chunks is 300");
  MOE((l->wanted = &again, l->may_recompute = 0), "layer 2: no choice of what is wanted remains");
#undef MOE
  const sluice_stages_option_t own = {.kind = 9};
  LAYER((sluice_planner_layer_init(l, sizeof *l), l->options = &own, l->num_options = 1), "kind of option 0 is 9");
#undef LAYER
  s.layers[1] = NULL;
  REFUSED(plan(&s, 0), BAD, "layer 1: sluice_planner_layer_t is NULL");
  s.layers[1] = &s.layer[1], s.layer[1].struct_size = 8;
  REFUSED(plan(&s, 0), SLUICE_E_ABI, "layer 1: sluice_planner_layer_t");
  s.layer[1] = good.layer[1];
#define PROBLEM(field, value, text) \
  s.problem.field = (value);        \
  REFUSED(plan(&s, 0), BAD, text);  \
  s.problem.field = good.problem.field
  PROBLEM(num_layers, 0, "num_layers is 0");
  PROBLEM(num_layers, INT32_MAX, "num_layers is 2147483647");
  PROBLEM(layers, NULL, "layers NULL");
  PROBLEM(num_stages, 5, "no stage stays empty");
  PROBLEM(reserved, 3, "reserved is 3");
#undef PROBLEM
  REFUSED(sluice_planner_stages(NULL, &s.result), BAD, "sluice_planner_problem_t is NULL");
  REFUSED(sluice_planner_stages(&s.problem, NULL), BAD, "sluice_planner_result_t is NULL");
  s.result.choices = NULL;
  REFUSED(plan(&s, 0), BAD, "choices is NULL");
  s.result.choices = s.choices;
  sluice_planner_workload_t wider = good_work;
  wider.world_size = 8;
  for (int32_t i = 1; i < 4; i += 2) {
    sluice_planner_layer_init(&s.layer[i], sizeof s.layer[i]);
    s.layer[i].planner = planner, s.layer[i].moe = i == 1 ? &work : &wider;
  }
  REFUSED(plan(&s, 0), BAD, "layer 3: world_size is 8, and 4 in layer 1");
  wider.world_size = 4;
  WORKS(plan(&s, 0));
}

TEST(Stages_NthAllocationFails_LeaksNothingAndSaysSo) {
  sluice_planner_workload_t work = new_workload();
  const sluice_planner_choice_t few = {2, -1, -1, SLUICE_WGRAD_DEFERRED};
  static scene_t s;
  open_moe(&s, &work, 3);
  for (int32_t i = 0; i < 3; ++i) s.layer[i].wanted = &few;
  sluice_allocator_t* allocator = sluice_process_allocator();
  const uint64_t live = allocator->num_live;
  sluice_status_t status = SLUICE_E_NO_MEMORY;
  int64_t nth = 0;
  for (; status == SLUICE_E_NO_MEMORY; ++nth) {
    allocator->fail_after = nth;
    status = plan(&s, 0);
    allocator->fail_after = -1;
    assert_int_equal(allocator->num_live, live);
  }
  assert_int_equal(status, SLUICE_OK);
  assert_true(nth > 20);
}

int main(void) { return run_cases(planner_open, planner_close); }
