// SPDX-License-Identifier: Apache-2.0
/* Joint choice of n and strategy on simulated machines, on which the best pair depends on the size of the batch. */
#include <math.h>

#include "backend/tune/search/search.h"
#include "backend/tune/search/test/surface.h"
#include "backend/tune/tuner_strategy.h"
#include "third_party/bazel/test.h"

enum { STRATEGIES = SLUICE_JOINT_STRATEGIES };

/* A pass takes the time with everything saved, plus a cost per row and per chunk of the strategy. */
typedef struct machine_s {
  surface_t surface;
  double per_row[STRATEGIES], per_chunk[STRATEGIES];
} machine_t;

static double seconds_of(const machine_t* m, int32_t k, int64_t rows, int32_t n, int32_t direction) {
  return truth(&m->surface, rows, n, 0, direction) + m->per_row[k] * (double)rows + m->per_chunk[k] * n;
}

static double step_of(const machine_t* m, int32_t k, int64_t rows, int32_t n) {
  return seconds_of(m, k, rows, n, SLUICE_FORWARD) + seconds_of(m, k, rows, n, SLUICE_BACKWARD);
}

/* A strategy with a low cost per row has a higher cost per chunk: copies cost bytes, exchanges and GEMMs cost
 * start-ups. */
static machine_t random_machine(uint32_t* seed) {
  machine_t m = {.surface = random_surface(seed)};
  for (int32_t k = 0; k < STRATEGIES; ++k) {
    m.per_row[k] = log_uniform(seed, 3e-8, 3e-6);
    m.per_chunk[k] = 1e-10 / m.per_row[k];
  }
  return m;
}

/* The best of all pairs that the searches consider. */
static double exhaustive_pairs(const machine_t* m, int64_t rows, const sluice_search_config_t* config, int32_t* out_k) {
  double best = INFINITY;
  for (int32_t k = 0; k < STRATEGIES; ++k) {
    for (int32_t size = config->min_size; size <= config->max_size; ++size) {
      if (!is_considered(config, size)) continue;
      const double seconds = step_of(m, k, rows, sluice_pick_chunks(size));
      if (seconds < best) best = seconds, *out_k = k;
    }
  }
  return best;
}

typedef struct user_s {
  struct world_s* world;
  int32_t k;
} user_t;

typedef struct world_s {
  machine_t machine;
  sluice_tuner_t tuner;
  sluice_tuner_table_t tables[STRATEGIES];
  sluice_tuner_strategy_t joint;
  user_t users[STRATEGIES];
  int num_predictions;
  int32_t k, why; /* of the last step */
} world_t;

static double predict_pair(void* user, int64_t rows, int32_t n, int32_t wgrad, int32_t direction) {
  const user_t* of = user;
  (void)wgrad;
  ++of->world->num_predictions;
  return seconds_of(&of->world->machine, of->k, rows, n, direction);
}

static void begin(world_t* w, int32_t mode, int knows) {
  const machine_t machine = w->machine;
  memset(w, 0, sizeof *w);
  w->machine = machine;
  for (int32_t k = 0; k < STRATEGIES; ++k) {
    w->users[k].world = w, w->users[k].k = k;
    sluice_search_config_t config = config_of(mode);
    config.min_size = 1, config.wgrad_mode = 1;
    if (knows) config.predict = predict_pair, config.user = &w->users[k];
    w->tables[k].tuner = &w->tuner, w->tables[k].restore_set = k + 1;
    sluice_search_init(&w->tables[k].search, &config);
    w->joint.tables[w->joint.count++] = &w->tables[k];
  }
}

/* Strategies that differ only in their cost per row. */
static void begin_by_rows(world_t* w, const double* per_row, int32_t mode, int knows) {
  uint32_t seed = 3;
  w->machine = random_machine(&seed);
  for (int32_t k = 0; k < STRATEGIES; ++k) w->machine.per_row[k] = per_row[k], w->machine.per_chunk[k] = 0;
  begin(w, mode, knows);
}

/* Reports the time of a step with a strategy's pick. */
static void observe(world_t* w, int64_t rows, int32_t k, int32_t pick) {
  for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
    const uint64_t ns = (uint64_t)(1e9 * seconds_of(&w->machine, k, rows, sluice_pick_chunks(pick), d));
    sluice_tuner_strategy_observe(&w->joint, k + 1, d, pick, rows, ns);
    sluice_search_observe(&w->tables[k].search, d, pick, rows, ns, NULL);
  }
}

/* One step; returns its time. */
static double step(world_t* w, int64_t rows) {
  int32_t pick = 0;
  w->k = sluice_tuner_strategy_next(&w->joint, rows, &pick, &w->why)->restore_set - 1;
  assert_true(sluice_pick_chunks(pick) >= 2);
  observe(w, rows, w->k, pick);
  return step_of(&w->machine, w->k, rows, sluice_pick_chunks(pick));
}

static const int64_t sizes[] = {256, 1024, 4096, 16384};
enum { SIZES = 4, MACHINES = 30 };

/* Batches of four alternating sizes: each size ends at its own pair, close to the best of all pairs. */
TEST(Joint_EachSize_EndsNearTheBestPair) {
  static world_t w;
  static const struct {
    int32_t mode, knows;
    double most; /* mean regret */
  } cases[] = {{SLUICE_TUNER_PROFILE, 0, 0.01}, {SLUICE_TUNER_ADAPTIVE, 1, 0.01}, {SLUICE_TUNER_MODEL, 1, 1e-9}};
  for (int c = 0; c < 3; ++c) {
    uint32_t seed = 11;
    double regret = 0;
    int changes = 0;
    for (int m = 0; m < MACHINES; ++m) {
      w.machine = random_machine(&seed);
      begin(&w, cases[c].mode, cases[c].knows);
      int32_t best_of[SIZES];
      double last[SIZES] = {0};
      for (int i = 0; i < 4000; ++i) last[i % SIZES] = step(&w, sizes[i % SIZES]);
      for (int s = 0; s < SIZES; ++s) {
        regret += last[s] / exhaustive_pairs(&w.machine, sizes[s], &w.tables[0].search.config, &best_of[s]) - 1;
        if (s > 0) changes += best_of[s] != best_of[s - 1];
      }
      assert_true(w.tuner.num_decisions >= SIZES);
    }
    regret /= MACHINES * SIZES;
    printf("mode %d: mean regret %.3f %%, the best strategy changes between neighbouring sizes in %d of %d\n",
           cases[c].mode, 100 * regret, changes, MACHINES * (SIZES - 1));
    assert_true(changes > 10); /* else one answer would suffice for all sizes */
    if (regret > cases[c].most) fail_msg("mode %d: mean regret %g", cases[c].mode, regret);
  }
}

/* With a machine, a strategy that is predicted to be far slower never runs. */
TEST(Joint_SlowByPrediction_IsNotTried) {
  static world_t w;
  begin_by_rows(&w, (double[]){1e-8, 1e-8, 1e-3, 1e-8}, SLUICE_TUNER_ADAPTIVE, 1);
  int ran[STRATEGIES] = {0};
  for (int i = 0; i < 1000; ++i) {
    (void)step(&w, 4096);
    ++ran[w.k];
  }
  assert_true(ran[2] == 0 && ran[0] > 0 && ran[1] > 0 && ran[3] > 0);
}

/* A prediction takes milliseconds: settled sizes that alternate ask for none and keep their answers. */
TEST(Joint_SettledSizes_AskForNoPrediction) {
  static world_t w;
  static const int32_t modes[] = {SLUICE_TUNER_ADAPTIVE, SLUICE_TUNER_MODEL};
  for (int c = 0; c < 2; ++c) {
    uint32_t seed = 5;
    w.machine = random_machine(&seed);
    begin(&w, modes[c], 1);
    int32_t of_size[SIZES] = {0};
    for (int i = 0; i < 800; ++i) (void)step(&w, sizes[i % SIZES]), of_size[i % SIZES] = w.k;
    const int asked = w.num_predictions;
    assert_true(asked > 0);
    for (int i = 0; i < 160; ++i) { /* answers are raced again after 512 passes */
      (void)step(&w, sizes[i % SIZES]);
      assert_true(w.k == of_size[i % SIZES] && w.why != SLUICE_WHY_ON_TRIAL);
    }
    assert_int_equal(w.num_predictions, asked);
  }
}

/* Only one strategy is predicted to be fast, so no comparison runs: its time is that of the race for n. */
TEST(Joint_OneIsTried_DecisionSaysWhatItTook) {
  static world_t w;
  begin_by_rows(&w, (double[]){1e-3, 1e-8, 1e-3, 1e-3}, SLUICE_TUNER_ADAPTIVE, 1);
  double took = 0;
  for (int i = 0; i < 200; ++i) {
    took = step(&w, 4096);
    assert_int_equal(w.k, 1);
  }
  assert_int_equal(w.tuner.num_decisions, 1);
  const sluice_search_decision_t* said = &w.tuner.decisions[0].what;
  assert_true(fabs(said->seconds / took - 1) < 1e-3 && said->why == SLUICE_WHY_RACED);
}

static const double three_close[STRATEGIES] = {1e-6, 1.001e-6, 1.7e-6, 1.002e-6}; /* the first is the best */

/* Strategies that are close run more often than the others, one window at a time; then only the best runs. */
TEST(Joint_Comparison_RunsWindowsOnEnd) {
  static world_t w;
  begin_by_rows(&w, three_close, SLUICE_TUNER_PROFILE, 0);
  int ran[STRATEGIES] = {0}, on_end = 0, last = -1;
  for (int i = 0; i < 400; ++i) {
    int is_searched = 0;
    for (int32_t k = 0; k < STRATEGIES; ++k)
      is_searched |= w.tables[k].search.spots[sluice_search_bucket(4096)].state != SLUICE_SPOT_ANSWERED;
    (void)step(&w, 4096);
    if (is_searched || w.why != SLUICE_WHY_ON_TRIAL) continue;
    ++ran[w.k];
    if (last >= 0 && w.k != last) assert_int_equal(on_end % 4, 0);
    on_end = w.k == last ? on_end + 1 : 1;
    last = w.k;
  }
  /* a step is observed with the choice that ends the search */
  assert_true(ran[0] >= 15 && ran[1] >= 15 && ran[3] >= 15);
  assert_true(ran[2] >= 3 && ran[2] <= 4);
  (void)step(&w, 4096);
  assert_int_equal(w.k, 0);
}

/* Layers of a kind share a comparison. Each reports its last step just before its next, so more steps of a strategy are
 * in flight than a window holds. The comparison still ends, and all layers run its answer. */
TEST(Joint_ManyLayers_ComparisonEnds) {
  enum { LAYERS = 50, ROWS = 4096 };
  static world_t w;
  for (int32_t layers = 1; layers <= LAYERS; ++layers) {
    begin_by_rows(&w, three_close, SLUICE_TUNER_PROFILE, 0);
    int32_t pick[LAYERS], last[LAYERS], on_trial = 0;
    memset(last, -1, sizeof last);
    for (int i = 0; i < 240; ++i) {
      on_trial = 0;
      for (int32_t l = 0; l < layers; ++l) {
        int32_t why = 0;
        if (last[l] >= 0) observe(&w, ROWS, last[l], pick[l]);
        last[l] = sluice_tuner_strategy_next(&w.joint, ROWS, &pick[l], &why)->restore_set - 1;
        on_trial += why == SLUICE_WHY_ON_TRIAL;
      }
      if (on_trial == 0) break;
    }
    if (on_trial != 0) fail_msg("%d layers: %d are on trial still", layers, on_trial);
    for (int32_t l = 0; l < layers; ++l) assert_int_equal(last[l], 0);
  }
}

/* At first the strategy that stores nothing runs. */
TEST(Joint_NothingKnown_IsS4WithTwoChunks) {
  static world_t w;
  uint32_t seed = 3;
  w.machine = random_machine(&seed);
  begin(&w, SLUICE_TUNER_PROFILE, 0);
  int32_t pick = 0, why = 0;
  assert_int_equal(sluice_tuner_strategy_next(&w.joint, 0, &pick, &why)->restore_set, 4);
  assert_true(sluice_pick_chunks(pick) == 2 && why == SLUICE_WHY_NOTHING_YET);
}
