// SPDX-License-Identifier: Apache-2.0
/* A race always ends, whatever the machine, the model and the host do: sizes that change at each step, several
 * outstanding forwards, replays, forwards without a backward, untimed passes. */
#include <math.h>

#include "backend/tune/search/test/surface.h"
#include "third_party/bazel/test.h"

/* ---- a host ---- */

enum { MOST_OUTSTANDING = 24, MOST_LAYERS = 96 };

typedef enum sizes_e { SAME, TWO_IN_TURNS, THREE_IN_TURNS, FIVE_IN_TURNS, SIX_AT_RANDOM, GROWING, WILD, SIZES } sizes_t;
typedef enum model_kind_e { NO_MODEL, WRONG, SILENT, NOT_A_NUMBER, ENDLESS, AT_RANDOM, MODELS } model_kind_t;

typedef struct pass_s {
  int32_t pick;
  int64_t rows;
  uint64_t ns; /* 0: not timed */
  sluice_lanes_t lanes;
} pass_t;

/* As in backend/moe: the choice of the next forward, the rows of the last one, reports for the next header. */
typedef struct decision_s {
  int32_t pick;
  int64_t rows;
  pass_t report[2], outstanding[MOST_OUTSTANDING]; /* rows 0: none */
} decision_t;

typedef struct host_s {
  surface_t surface;
  model_t model;
  model_kind_t kind;
  double noise, flip;    /* factor in time of a slow phase */
  double untimed[2];     /* share of passes, by direction, that some rank ran differently or did not time */
  double backward_share; /* share of steps with a backward; the others evaluate with gradients enabled */
  double other_rows;     /* received rows in backward over those in forward */
  int32_t num_layers, depth, repeats, has_lanes;
  sizes_t sizes;
  int64_t base;
  uint32_t seed;
  int32_t step;
  decision_t decisions[MOST_LAYERS];
} host_t;

static int64_t rows_of(host_t* h) {
  static const double factors[] = {1, 7, 2.6, 0.3, 17, 4};
  switch (h->sizes) {
    case SAME: return h->base;
    case TWO_IN_TURNS: return (int64_t)((double)h->base * factors[h->step % 2]);
    case THREE_IN_TURNS: return (int64_t)((double)h->base * factors[h->step % 3]);
    case FIVE_IN_TURNS: return (int64_t)((double)h->base * factors[h->step % 5]);
    case SIX_AT_RANDOM: return (int64_t)((double)h->base * factors[next_random(&h->seed) % 6]);
    case GROWING: return (int64_t)((double)h->base * exp(0.002 * h->step));
    default: return (int64_t)log_uniform(&h->seed, 16, 65536);
  }
}

static double say(void* user, int64_t rows, int32_t n, int32_t wgrad, int32_t direction) {
  host_t* h = user;
  switch (h->kind) {
    case SILENT: return 0;
    case NOT_A_NUMBER: return NAN;
    case ENDLESS: return INFINITY;
    case AT_RANDOM: return log_uniform(&h->seed, 1e-6, 1);
    default: return predict(&h->model, rows, n, wgrad, direction);
  }
}

static host_t random_host(uint32_t* seed) {
  static const double shares[] = {0, 0, 0.1, 0.6, 1};
  host_t h = {.surface = random_surface(seed)};
  h.model = wrong_model(&h.surface, seed, 0.9);
  h.kind = (model_kind_t)(next_random(seed) % MODELS);
  h.noise = next_random(seed) % 2 ? 0.02 : 0.5;
  h.flip = next_random(seed) % 2 ? 1 : 1.7;
  for (int32_t d = 0; d < 2; ++d) h.untimed[d] = shares[next_random(seed) % 5];
  h.backward_share = 1 - shares[next_random(seed) % 5];
  h.other_rows = next_random(seed) % 4 ? 1 : 1.4;
  h.num_layers = 1 + (int32_t)(next_random(seed) % 2);
  h.depth = next_random(seed) % 2 ? 1 : 1 + (int32_t)(next_random(seed) % 8);
  h.repeats = next_random(seed) % 4 == 0;
  h.has_lanes = next_random(seed) % 4 != 0;
  h.sizes = (sizes_t)(next_random(seed) % SIZES);
  h.base = (int64_t)log_uniform(seed, 64, 16384);
  h.seed = next_random(seed);
  return h;
}

static sluice_search_config_t random_config(host_t* h, uint32_t* seed) {
  sluice_search_config_t config = config_of((int32_t)(next_random(seed) % 3));
  config.open_wgrad = (int32_t)(next_random(seed) % 2);
  if (config.open_wgrad && next_random(seed) % 4 == 0) {
    config.fixed_chunks = 5, config.min_size = config.max_size = sluice_search_size_of(5);
  }
  config.repeats = (int32_t)(next_random(seed) % 3); /* 0: the default */
  if (h->kind != NO_MODEL) config.predict = say, config.user = h;
  return config;
}

/* ---- its steps ---- */

static pass_t run_pass(host_t* h, const sluice_search_t* s, int32_t direction, int32_t pick, int64_t rows) {
  int32_t n = sluice_search_chunks(s, pick);
  pass_t pass = {.pick = pick, .rows = rows};
  double seconds = truth(&h->surface, rows, n, sluice_pick_wgrad(pick), direction);
  if (h->step / 37 % 2) seconds *= h->flip;
  pass.ns = noisy_ns(seconds, &h->seed, h->noise);
  pass.lanes = lanes_of(&h->surface, rows, n, direction);
  if (direction == SLUICE_BACKWARD) pass.rows = (int64_t)((double)rows * h->other_rows);
  if (uniform(&h->seed, 0, 1) < h->untimed[direction]) pass.ns = 0;
  return pass;
}

/* The header of a forward: reports are read, and the decision state gets the choice of the next forward. */
static void header(const host_t* h, sluice_search_t* s, decision_t* decision, int32_t* trials, int32_t* worst) {
  int has_trained = 0;
  for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
    const pass_t* p = &decision->report[d];
    has_trained |= p->rows > 0;
    if (p->ns > 0) sluice_search_observe(s, d, p->pick, p->rows, p->ns, h->has_lanes ? &p->lanes : NULL);
    decision->report[d] = (pass_t){0};
  }
  int32_t why;
  if (has_trained) sluice_search_wait(s, decision->rows, (int32_t)(decision - h->decisions));
  decision->pick = sluice_search_next(s, decision->rows, &why);
  assert_in_range(decision->pick, 0, SLUICE_SEARCH_PICKS - 1);
  int32_t* count = &trials[sluice_search_bucket(decision->rows)];
  *count = why == SLUICE_WHY_ON_TRIAL ? *count + 1 : 0;
  if (*count > *worst) *worst = *count;
}

/* Runs as many forwards as are outstanding at a time, and then their backwards. */
static void run_steps(host_t* h, sluice_search_t* s, decision_t* decision, int32_t* trials, int32_t* worst) {
  int has_backward = uniform(&h->seed, 0, 1) < h->backward_share;
  for (int32_t i = 0; i < h->depth; ++i) {
    int32_t pick = decision->pick;
    int64_t rows = rows_of(h);
    header(h, s, decision, trials, worst);
    decision->report[SLUICE_FORWARD] = run_pass(h, s, SLUICE_FORWARD, pick, rows);
    decision->rows = rows;
    decision->outstanding[i] = (pass_t){.pick = pick, .rows = rows};
  }
  for (int32_t i = 0; i < h->depth && has_backward; ++i) {
    const pass_t* p = &decision->outstanding[i];
    if (h->repeats) {
      header(h, s, decision, trials, worst);
      decision->report[SLUICE_FORWARD] = run_pass(h, s, SLUICE_FORWARD, p->pick, p->rows);
    }
    decision->report[SLUICE_BACKWARD] = run_pass(h, s, SLUICE_BACKWARD, p->pick, p->rows);
  }
}

/* The most consecutive trials of a forward of one size. */
static int32_t longest_trial(host_t* h, const sluice_search_config_t* config, int32_t steps) {
  static sluice_search_t search;
  int32_t trials[SLUICE_SEARCH_BUCKETS] = {0}, worst = 0;
  sluice_search_init(&search, config);
  for (int32_t l = 0; l < h->num_layers; ++l) h->decisions[l].pick = sluice_search_next(&search, 0, NULL);
  for (h->step = 0; h->step < steps; ++h->step) {
    for (int32_t l = 0; l < h->num_layers; ++l) run_steps(h, &search, &h->decisions[l], trials, &worst);
  }
  return worst;
}

/* ---- cases ---- */

enum { HOSTS = 1500, STEPS = 3000, BOUND = 2000 };

TEST(AnyHost_EverySize_IsSettledWithinABound) {
  uint32_t seed = 17;
  int32_t most = 0;
  for (int i = 0; i < HOSTS; ++i) {
    uint32_t begin = seed;
    host_t host = random_host(&seed);
    sluice_search_config_t config = random_config(&host, &seed);
    int32_t trial = longest_trial(&host, &config, STEPS / host.depth);
    if (trial > most) most = trial;
    if (trial > BOUND) {
      print_error(
          "host %d (seed %u): mode %d, model %d, sizes %d, %d layers, %d outstanding, repeats %d, backwards "
          "%.1f, untimed %.1f and %.1f, both modes %d, n %d: %d forwards of one size in a row on trial\n",
          i, begin, config.mode, (int)host.kind, (int)host.sizes, host.num_layers, host.depth, host.repeats,
          host.backward_share, host.untimed[0], host.untimed[1], config.open_wgrad, config.fixed_chunks, trial);
    }
    assert_true(trial <= BOUND);
  }
  printf("%d hosts: the longest trial of a size took %d of its forwards\n", HOSTS, most);
}

static host_t plain_host(void) {
  uint32_t seed = 3;
  return (host_t){.surface = random_surface(&seed),
                  .noise = 0.02,
                  .flip = 1,
                  .backward_share = 1,
                  .other_rows = 1,
                  .num_layers = 1,
                  .depth = 1,
                  .has_lanes = 1,
                  .base = 2048,
                  .seed = 5};
}

/* Layers of one kind share a race, and each reports its choice two of its forwards later. All other layers run in
 * between, which must not end the race. */
TEST(ManyLayers_ToldTwoForwardsLater_BestIsFound) {
  static sluice_search_t search;
  static host_t host;
  for (int32_t mode = SLUICE_TUNER_ADAPTIVE; mode <= SLUICE_TUNER_PROFILE; ++mode) {
    for (int32_t depth = 1; depth <= 4; depth += 3) { /* forwards outstanding */
      host = plain_host();
      host.surface = (surface_t){.alpha = 1e-5, .beta = 1e-6, .gemm_startup = 1e-6, .gemm_rate = 1e-6, .tile = 1};
      host.num_layers = MOST_LAYERS, host.depth = depth;
      const sluice_search_config_t config = config_of(mode);
      int32_t trials[SLUICE_SEARCH_BUCKETS] = {0}, worst = 0, why = SLUICE_WHY_ON_TRIAL, pick = 0;
      sluice_search_init(&search, &config);
      /* Until the size is answered, even if an answer was just being raced again. */
      for (host.step = 0; host.step < 60 || (host.step < 120 && why == SLUICE_WHY_ON_TRIAL); ++host.step) {
        for (int32_t l = 0; l < host.num_layers; ++l) run_steps(&host, &search, &host.decisions[l], trials, &worst);
        pick = sluice_search_next(&search, host.base, &why);
      }
      assert_true(why == SLUICE_WHY_RACED || why == SLUICE_WHY_QUESTIONED);
      assert_true(whole(&host.surface, host.base, pick) <= 1.05 * exhaustive(&host.surface, host.base, &config));
    }
  }
}

/* A layer that began a lap and never runs again: the other layers still count laps. */
TEST(ManyLayers_OneIsGone_RacesEnd) {
  static sluice_search_t search;
  const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  sluice_search_init(&search, &config);
  int32_t why = 0, steps = 0;
  sluice_search_next(&search, 8000, &why);
  sluice_search_wait(&search, 8000, 99);
  for (; steps < 1000 && why == SLUICE_WHY_ON_TRIAL; ++steps) {
    for (int32_t layer = 0; layer < 10; ++layer) {
      sluice_search_next(&search, 8000, &why);
      sluice_search_wait(&search, 8000, layer);
    }
  }
  assert_true(steps > 128 && steps < 300);
}

/* No candidate has run, but a neighbour has an answer: the race ends with that answer, not with the fewest chunks. */
TEST(GivenUp_NothingRan_TakesTheNearestAnswer) {
  static sluice_search_t search;
  const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  sluice_search_init(&search, &config);
  sluice_search_answer(&search, 1000, sluice_search_size_of(6));
  int32_t why = SLUICE_WHY_ON_TRIAL, pick = 0, asked = 0;
  for (; asked < 500 && why == SLUICE_WHY_ON_TRIAL; ++asked) {
    pick = sluice_search_next(&search, 8000, &why);
    sluice_search_wait(&search, 8000, 7);
  }
  assert_true(asked > 100 && asked < 200);
  assert_int_equal(why, SLUICE_WHY_INSIDE_RANGE);
  assert_int_equal(sluice_pick_chunks(pick), 6);
}

/* Evaluation forwards between two steps report nothing: the race waits for training to continue. */
TEST(Evaluation_InsideARace_DoesNotEndIt) {
  static sluice_search_t search;
  const surface_t surface = {.alpha = 1e-5, .beta = 1e-6, .gemm_startup = 1e-6, .gemm_rate = 1e-6, .tile = 1};
  const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  uint32_t seed = 1;
  int32_t why;
  sluice_search_init(&search, &config);
  run_step(&search, &surface, 4096, &seed, 0);
  for (int i = 0; i < 1000; ++i) sluice_search_next(&search, 4096, &why);
  assert_int_equal(why, SLUICE_WHY_ON_TRIAL);
  for (int step = 0; step < 100; ++step) run_step(&search, &surface, 4096, &seed, 0);
  int32_t pick = sluice_search_next(&search, 4096, &why);
  assert_true(whole(&surface, 4096, pick) <= 1.02 * exhaustive(&surface, 4096, &config));
}

/* A model without a prediction chooses nothing: steps decide. */
TEST(Model_WithoutANumber_IsNotAsked) {
  for (int32_t mode = SLUICE_TUNER_ADAPTIVE; mode <= SLUICE_TUNER_MODEL; ++mode) {
    static sluice_search_t search;
    host_t host = plain_host();
    host.kind = NOT_A_NUMBER;
    sluice_search_config_t config = config_of(mode);
    config.predict = say, config.user = &host;
    sluice_search_init(&search, &config);
    for (int step = 0; step < 200; ++step) run_step(&search, &host.surface, host.base, &host.seed, 0);
    int32_t why, pick = sluice_search_next(&search, host.base, &why);
    assert_int_equal(why, SLUICE_WHY_RACED);
    assert_true(whole(&host.surface, host.base, pick) <= 1.05 * exhaustive(&host.surface, host.base, &config));
  }
}
