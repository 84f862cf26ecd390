// SPDX-License-Identifier: Apache-2.0
/* Machines that break the two assumptions of the papers' search: time over n has one valley, and the best n grows with
 * the batch. Races still end, no answer is worse than the measured candidates, and repeated races find the best. */
#include <math.h>

#include "backend/tune/search/search_times.h"
#include "backend/tune/search/test/surface.h"
#include "third_party/bazel/test.h"

typedef enum kind_e { RUGGED, RIDGE, FALLS, JUMPS, KINDS } kind_t;
enum { SIZES = 3, FIRST_STEPS = 300, STEPS = 40000, MACHINES = 10, MOST_TRIALS = 120 };

static const char* const names[KINDS] = {"hills at every n", "a ridge", "best n falls", "best n jumps"};
static const double factors[SIZES] = {1, 3, 10};

static surface_t broken_surface(uint32_t* seed, kind_t kind) {
  surface_t s = random_surface(seed);
  const int32_t at = 1 + (int32_t)(next_random(seed) % 10);
  for (int32_t i = 0; kind == RUGGED && i < SLUICE_SEARCH_SIZES; ++i) s.hill[i] = uniform(seed, 0, 0.3);
  for (int32_t i = at; kind == RIDGE && i < at + 4; ++i) s.hill[i] = uniform(seed, 0.2, 0.6);
  if (kind == FALLS) s.alpha = log_uniform(seed, 1e-5, 1e-4), s.growth = 1.8;
  if (kind == JUMPS) s.jumps = 30;
  return s;
}

static int32_t best_size(const surface_t* s, int64_t rows) {
  int32_t best = 0;
  for (int32_t size = 1; size < SLUICE_SEARCH_SIZES; ++size) {
    if (whole(s, rows, size) < whole(s, rows, best)) best = size;
  }
  return best;
}

/* Whether the assumption fails by 5 %: a hill between two n that are both faster, or a smaller batch whose best n is
 * too large for a larger batch. */
static int is_broken(const surface_t* s, int64_t base, kind_t kind) {
  for (int32_t z = 0; z < SIZES; ++z) {
    const int64_t rows = (int64_t)((double)base * factors[z]),
                  smaller = z == 0 ? rows : (int64_t)(base * factors[z - 1]);
    if (kind >= FALLS) {
      const int32_t best = best_size(s, rows), before = best_size(s, smaller);
      if (best < before && whole(s, rows, before) > 1.05 * whole(s, rows, best)) return 1;
      continue;
    }
    double least = INFINITY, crest = 0;
    for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
      const double time = whole(s, rows, size);
      if (crest > 1.05 * least && crest > 1.05 * time) return 1;
      if (time < least) least = time, crest = 0;
      crest = fmax(crest, time);
    }
  }
  return 0;
}

/* A race of several candidates ends with the fastest, except that an earlier or a nearby choice stays if it takes at
 * most 3 % more. */
static void must_be_the_fastest(void* user, const sluice_search_decision_t* d) {
  (void)user;
  if (d->seconds > 0 && d->runner_up_seconds > 0) assert_true(d->seconds <= 1.0301 * d->runner_up_seconds);
}

typedef struct run_s {
  const surface_t* surface;
  sluice_search_config_t config;
  int64_t base;
  late_t late[SIZES];
  int32_t trials[SIZES];
} run_t;

static int64_t rows_of(const run_t* run, int32_t z) { return (int64_t)((double)run->base * factors[z]); }

static void run_steps(run_t* run, sluice_search_t* search, uint32_t* seed, int32_t steps) {
  for (int32_t i = 0; i < steps; ++i) {
    const int32_t z = (int32_t)(next_random(seed) % SIZES);
    (void)run_late_step(search, run->surface, rows_of(run, z), seed, 0, &run->late[z]);
    const int32_t is_racing = search->spots[sluice_search_bucket(rows_of(run, z))].state == SLUICE_SPOT_RACING;
    run->trials[z] = is_racing ? run->trials[z] + 1 : 0;
    assert_true(run->trials[z] <= MOST_TRIALS);
  }
}

/* The mean loss of the answers; *worst: the largest so far. */
static double loss_of(const run_t* run, const sluice_search_t* search, double* worst) {
  double sum = 0;
  for (int32_t z = 0; z < SIZES; ++z) {
    const int64_t rows = rows_of(run, z);
    const sluice_spot_t* spot = &search->spots[sluice_search_bucket(rows)];
    const int32_t fastest = sluice_spot_best(spot, spot->raced);
    assert_true(spot->state != SLUICE_SPOT_NOTHING);
    if (spot->state == SLUICE_SPOT_ANSWERED && fastest >= 0)
      assert_true(whole(run->surface, rows, spot->pick) <= 1.0301 * whole(run->surface, rows, fastest));
    const double loss = whole(run->surface, rows, spot->pick) / exhaustive(run->surface, rows, &run->config) - 1;
    sum += loss / SIZES;
    *worst = fmax(*worst, loss);
  }
  return sum;
}

/* `wrong`: error of a model of the machine without its hills and jumps; below 0: no model. */
static void run_machines(kind_t kind, int32_t mode, double wrong) {
  static sluice_search_t search;
  uint32_t seed = 7;
  double first = 0, last = 0, worst_first = 0, worst_last = 0;
  for (int32_t i = 0; i < MACHINES;) {
    const surface_t surface = broken_surface(&seed, kind);
    run_t run = {.surface = &surface, .base = (int64_t)log_uniform(&seed, 128, 4096)};
    if (!is_broken(&surface, run.base, kind)) continue;
    surface_t smooth = surface;
    for (int32_t k = 0; k < SLUICE_SEARCH_SIZES; ++k) smooth.hill[k] = 0;
    smooth.growth = smooth.jumps = 0;
    model_t model = wrong_model(&smooth, &seed, fmax(wrong, 0));
    run.config = config_of(mode);
    run.config.decided = must_be_the_fastest;
    if (wrong >= 0) run.config.predict = predict, run.config.user = &model;
    for (int32_t z = 0; z < SIZES; ++z) run.late[z].pick = -1;
    sluice_search_init(&search, &run.config);
    run_steps(&run, &search, &seed, FIRST_STEPS);
    first += loss_of(&run, &search, &worst_first) / MACHINES;
    run_steps(&run, &search, &seed, STEPS);
    last += loss_of(&run, &search, &worst_last) / MACHINES;
    ++i;
  }
  printf(
      "%s, mode %d%s: loss after the first races %.2f %% (worst %.2f %%), after races of the answers %.2f %% (%.2f "
      "%%)\n",
      names[kind], mode, wrong < 0 ? "" : " with a model", 100 * first, 100 * worst_first, 100 * last,
      100 * worst_last);
  assert_true(first <= 0.04 && last <= 0.005 && worst_last <= 0.02);
}

TEST(SeveralValleys_AnswersThatRaceAgain_FindTheBest) {
  for (kind_t kind = RUGGED; kind <= RIDGE; ++kind) {
    run_machines(kind, SLUICE_TUNER_PROFILE, -1);
    run_machines(kind, SLUICE_TUNER_ADAPTIVE, -1);
    run_machines(kind, SLUICE_TUNER_ADAPTIVE, 0.3);
  }
}

TEST(BestNFallsWithTheBatch_AnswersThatRaceAgain_FindTheBest) {
  for (kind_t kind = FALLS; kind <= JUMPS; ++kind) {
    run_machines(kind, SLUICE_TUNER_PROFILE, -1);
    run_machines(kind, SLUICE_TUNER_ADAPTIVE, -1);
    run_machines(kind, SLUICE_TUNER_ADAPTIVE, 0.3);
  }
}
