// SPDX-License-Identifier: Apache-2.0
/* Tests of the choice of exchange forms after the search for n, on simulated machines: the faster form stays, and a
 * form that cannot win is not tried. */

#include "backend/tune/search/grouping.h"
#include "backend/tune/search/search.h"
#include "backend/tune/search/test/surface.h"
#include "third_party/bazel/test.h"

enum { ROWS = 4096 };

/* A pass takes the time of the surface; grouped, `gain` times that; at n chunks the gain grows with the number of
 * pairs. */
typedef struct world_s {
  surface_t surface;
  double gain;      /* actual */
  double predicted; /* according to the model */
  double skew;
  int32_t least_chunks; /* as for groups */
  double least_skew;
  sluice_search_t search;
  sluice_grouping_t grouping;
  int32_t told, told_pick, told_why, told_grouped;
  int32_t grouped, why, pick; /* of the last step */
  int ran_grouped;
} world_t;

static double seconds_of(const world_t* w, double gain, int64_t rows, int32_t n, int32_t direction, int32_t grouped) {
  const double pairs = n > 2 ? (n - 2) / (double)n : 0;
  return truth(&w->surface, rows, n, 0, direction) * (grouped ? 1 - (1 - gain) * pairs : 1);
}

static double predict_grouped(void* user, int64_t rows, int32_t n, int32_t wgrad, int32_t direction, int32_t form) {
  const world_t* w = user;
  (void)wgrad, (void)form;
  return seconds_of(w, w->predicted, rows, n, direction, 1);
}

static double predict_single(void* user, int64_t rows, int32_t n, int32_t wgrad, int32_t direction) {
  (void)wgrad;
  return seconds_of(user, 1, rows, n, direction, 0);
}

static void decided(void* user, const sluice_grouping_decision_t* d) {
  world_t* w = user;
  ++w->told, w->told_pick = d->pick, w->told_why = d->why, w->told_grouped = d->form;
}

static void begin(world_t* w, int32_t mode, int knows) {
  sluice_search_config_t search = config_of(mode);
  if (knows) search.predict = predict_single, search.user = w;
  const sluice_grouping_config_t grouping = {.forms = {{1, w->least_chunks, w->least_skew}},
                                             .num_forms = 1,
                                             .mode = mode,
                                             .predict = knows ? predict_grouped : NULL,
                                             .user = w,
                                             .decided = decided};
  sluice_search_init(&w->search, &search);
  sluice_grouping_init(&w->grouping, &grouping);
  w->told = w->ran_grouped = 0;
}

/* Returns how many of the steps ran grouped. */
static int32_t run_steps(world_t* w, int32_t count) {
  const int32_t before = w->ran_grouped;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t answer = sluice_search_next(&w->search, ROWS, &w->why);
    w->pick = sluice_grouping_next(&w->grouping, &w->search, ROWS, w->skew, answer, &w->why, &w->grouped);
    w->ran_grouped += w->grouped;
    for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
      const double seconds = seconds_of(w, w->gain, ROWS, sluice_pick_chunks(w->pick), d, w->grouped);
      const uint64_t ns = (uint64_t)(1e9 * seconds);
      sluice_grouping_observe(&w->grouping, d, w->pick, w->grouped, ROWS, ns);
      if (w->grouped) {
        sluice_search_count_pass(&w->search, seconds);
      } else {
        sluice_search_observe(&w->search, d, w->pick, ROWS, ns, NULL);
      }
    }
  }
  return w->ran_grouped - before;
}

/* A machine on which sequential exchanges need several chunks. */
static void use_machine(world_t* w) {
  memset(w, 0, sizeof *w);
  w->surface = (surface_t){.alpha = 1e-4, .beta = 2e-6, .gemm_startup = 1e-5, .gemm_rate = 2e-6, .tile = 1};
  w->skew = 3, w->gain = w->predicted = 1;
  w->least_chunks = 3, w->least_skew = 1.15;
}

static const int32_t modes[] = {SLUICE_TUNER_PROFILE, SLUICE_TUNER_ADAPTIVE, SLUICE_TUNER_ADAPTIVE, SLUICE_TUNER_MODEL};
static const int knows[] = {0, 0, 1, 1};

TEST(Grouping_FasterInTruth_StaysInEveryMode) {
  static world_t w;
  for (int i = 0; i < 4; ++i) {
    use_machine(&w);
    w.gain = w.predicted = 0.8;
    begin(&w, modes[i], knows[i]);
    (void)run_steps(&w, 300);
    assert_true(w.grouped && w.why != SLUICE_WHY_ON_TRIAL && sluice_pick_chunks(w.pick) > 2);
    assert_true(w.told == 1 && w.told_pick == w.pick);
    assert_int_equal(w.told_why, modes[i] == SLUICE_TUNER_MODEL ? SLUICE_WHY_PREDICTED : SLUICE_WHY_RACED);
  }
}

TEST(Grouping_SlowerInTruth_RunsAFewStepsAndNoMore) {
  static world_t w;
  for (int i = 0; i < 3; ++i) {
    use_machine(&w);
    w.gain = 1.05, w.predicted = 0.8; /* the model is wrong */
    begin(&w, modes[i], knows[i]);
    assert_in_range(run_steps(&w, 300), 4, 8);
    assert_true(!w.grouped && w.why != SLUICE_WHY_ON_TRIAL && w.told == 0);
  }
}

/* A form that cannot win is not tried: even loads without a model, a prediction against it, a form that is not open. */
TEST(Grouping_NothingToGain_NeverRuns) {
  static world_t w;
  for (int i = 0; i < 5; ++i) {
    use_machine(&w);
    w.gain = 0.8;
    if (i < 2) w.skew = 1.1;
    const int32_t mode = i == 4 ? SLUICE_TUNER_ADAPTIVE : modes[i];
    begin(&w, mode, i == 4 ? 0 : knows[i]);
    if (i == 4) w.grouping.config.num_forms = 0;
    assert_int_equal(run_steps(&w, 300), 0);
  }
}

/* Routing that becomes uneven later starts another race, and so does routing that becomes even again. */
TEST(Grouping_SkewThatChanges_IsRacedAgain) {
  static world_t w;
  use_machine(&w);
  w.gain = 0.8, w.skew = 1;
  begin(&w, SLUICE_TUNER_ADAPTIVE, 0);
  assert_int_equal(run_steps(&w, 600), 0);
  w.skew = 4;
  assert_true(run_steps(&w, 300) > 0 && w.grouped);
  w.skew = 1;
  (void)run_steps(&w, 600);
  assert_false(w.grouped);
}

/* A race during a slow phase is not final, whichever form it favours; repeating it uses a share of the time. */
TEST(Grouping_UnluckyRace_IsRunAgain) {
  static world_t w;
  for (int i = 0; i < 4; ++i) {
    const int wins = i % 2 == 0; /* grouped, in truth */
    use_machine(&w);
    w.gain = i % 2 ? 0.8 : 1.2, w.predicted = 0.8;
    begin(&w, SLUICE_TUNER_ADAPTIVE, i / 2);
    (void)run_steps(&w, 120);
    assert_int_equal(w.grouped, !wins);
    w.gain = wins ? 0.8 : 1.2;
    int32_t num_grouped = run_steps(&w, 40000);
    assert_true((wins ? 40000 - num_grouped : num_grouped) < 40000 / 2);
    assert_int_equal(w.grouped, wins);
    assert_int_equal(w.told_grouped, wins);
    assert_true(w.why != SLUICE_WHY_ON_TRIAL && w.told_why == SLUICE_WHY_QUESTIONED && w.told == (wins ? 1 : 2));
    num_grouped = run_steps(&w, 20000);
    const int32_t num_slower = wins ? 20000 - num_grouped : num_grouped;
    printf("%s: mended, and then %d of 20000 steps in the slower form\n", wins ? "grouped" : "plain", num_slower);
    assert_true(num_slower < 20000 * 0.002 / 0.05);
  }
}

TEST(Grouping_StepsThatNeverCount_EndTheRace) {
  static world_t w;
  use_machine(&w);
  begin(&w, SLUICE_TUNER_ADAPTIVE, 0);
  (void)run_steps(&w, 60);
  w.grouping.spots[sluice_search_bucket(ROWS)].state = 0; /* a race without any report */
  for (int k = 0; k < 600; ++k) {
    w.why = SLUICE_WHY_RACED;
    const int32_t pick = w.search.spots[sluice_search_bucket(ROWS)].pick;
    (void)sluice_grouping_next(&w.grouping, &w.search, ROWS, w.skew, pick, &w.why, &w.grouped);
  }
  assert_true(!w.grouped && w.why == SLUICE_WHY_RACED);
}
