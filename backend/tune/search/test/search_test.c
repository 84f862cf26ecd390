// SPDX-License-Identifier: Apache-2.0
/* Rules of the search: all ranks choose the same, switches and valleys are counted, imported answers and limits are
 * respected. */
#include <math.h>

#include "backend/tune/search/test/surface.h"
#include "third_party/bazel/test.h"

TEST(Ranks_SameObservations_PickAlikeInEveryStep) {
  static sluice_search_t a, b;
  uint32_t seed = 5;
  surface_t surface = random_surface(&seed);
  const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  sluice_search_init(&a, &config);
  sluice_search_init(&b, &config);
  for (int step = 0; step < 3000; ++step) {
    int64_t rows = 500 + next_random(&seed) % 8000;
    int32_t pick = sluice_search_next(&a, rows, NULL);
    assert_int_equal(pick, sluice_search_next(&b, rows, NULL));
    for (int32_t d = 0; d < 2; ++d) {
      uint64_t ns = noisy_ns(truth(&surface, rows, sluice_pick_chunks(pick), 0, d), &seed, 0.1);
      sluice_search_observe(&a, d, pick, rows, ns, NULL);
      sluice_search_observe(&b, d, pick, rows, ns, NULL);
    }
  }
  assert_memory_equal(a.spots, b.spots, sizeof a.spots);
}

typedef struct switching_s {
  double total, cost; /* seconds of all steps after `settling`, and of switches as counted */
  int32_t switches;   /* between settled choices */
} switching_t;

/* Batches of two sizes with a different best n in turns of `turn` steps. Passes vary by the share `vary`; the first
 * pass after a switch takes `extra` seconds more. */
static switching_t run_switching(int32_t turn, double vary, double extra, int32_t settling, int32_t steps) {
  static sluice_search_t s;
  static const int64_t sizes[] = {256, 16384};
  const surface_t surface = {.alpha = 1e-3, .beta = 1e-6, .gemm_startup = 1e-5, .gemm_rate = 1e-6, .tile = 1};
  const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  uint32_t seed = 4;
  int32_t last = 0, why = 0;
  switching_t r = {0};
  sluice_search_init(&s, &config);
  for (int32_t step = 0; step < steps; ++step) {
    const int64_t rows = sizes[step / turn % 2];
    const int32_t pick = sluice_search_next(&s, rows, &why), switched = step > 0 && pick != last;
    if (step == settling) r.cost = -s.stats.switch_seconds, r.total = -s.stats.total_seconds;
    if (vary == 0) assert_true(step < settling || why == SLUICE_WHY_RACED);
    r.switches += step >= settling && switched && why != SLUICE_WHY_ON_TRIAL;
    for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
      const double seconds =
          truth(&surface, rows, sluice_pick_chunks(pick), 0, d) * uniform(&seed, 1, 1 + vary) + (switched ? extra : 0);
      if (switched) sluice_search_count_switch(&s, d, pick, rows, seconds);
      sluice_search_observe(&s, d, pick, rows, (uint64_t)(seconds * 1e9), NULL);
    }
    last = pick;
  }
  r.cost += s.stats.switch_seconds, r.total += s.stats.total_seconds;
  return r;
}

/* The first pass after each switch costs more and is counted once, in both directions. */
TEST(ChangingBatches_FirstPassAfterASwitch_IsCounted) {
  const double extra = 3e-3;
  const switching_t r = run_switching(5, 0, extra, 400, 600);
  assert_int_equal(r.switches, 40); /* every fifth step */
  assert_true(fabs(r.cost - 2 * 40 * extra) < 0.02 * 2 * 40 * extra);
}

/* Passes vary by half, and switches cost nothing: positive and negative differences of single passes cancel. */
TEST(ChangingBatches_PassesVary_SwitchesThatCostNothingAreCountedAsNothing) {
  const switching_t r = run_switching(3, 0.5, 0, 1000, 4000);
  const double share = r.cost / r.total;
  printf("%d switches that cost nothing, passes that vary by half: %.2f %% of the time\n", r.switches, 100 * share);
  assert_true(r.switches > 900 && fabs(share) < 0.01);
}

/* Every race checks the second hypothesis of the papers: GEMMs with a step in rows per chunk violate it. */
TEST(Race_OneValleyOrTwo_IsReported) {
  static sluice_search_t s;
  const double one[SLUICE_SEARCH_SIZES] = {9, 7, 5, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 8, 8, 9},
               two[SLUICE_SEARCH_SIZES] = {9, 5, 5, 7, 6, 5, 5, 6, 6, 7, 7, 8, 8, 8, 8, 9};
  for (int hills = 0; hills < 2; ++hills) {
    const double* seconds = hills ? two : one;
    const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
    sluice_search_init(&s, &config);
    for (int step = 0; step < 100; ++step) {
      int32_t pick = sluice_search_next(&s, 4096, NULL);
      for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
        sluice_search_observe(&s, d, pick, 4096, (uint64_t)(seconds[pick] * 1e6), NULL);
      }
    }
    assert_int_equal(s.stats.one_valley + s.stats.not_one_valley, 1);
    assert_int_equal(s.stats.one_valley, !hills);
  }
}

/* The warm-up of a candidate is a first pass after a switch, too: its cost is known once the next pass has run. */
TEST(Race_WarmUps_AreCountedAsSwitches) {
  static sluice_search_t s;
  const surface_t surface = {.alpha = 2e-4, .beta = 1e-6, .gemm_startup = 1e-5, .gemm_rate = 1e-6, .tile = 1};
  const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  sluice_search_init(&s, &config);
  int seen[SLUICE_SEARCH_PICKS] = {0};
  int32_t candidates = 0;
  for (int step = 0; step < 100; ++step) {
    int32_t pick = sluice_search_next(&s, 4096, NULL);
    candidates += seen[pick] == 0;
    for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
      double seconds = truth(&surface, 4096, sluice_pick_chunks(pick), 0, d) + (seen[pick] == 0 ? 1e-3 : 0);
      sluice_search_observe(&s, d, pick, 4096, (uint64_t)(seconds * 1e9), NULL);
    }
    ++seen[pick];
  }
  assert_true(candidates >= 3);
  assert_true(fabs(s.stats.switch_seconds - 2e-3 * candidates) < 1e-4 * candidates);
}

/* A model that predicts: the more chunks, the faster. */
static double likes_many_chunks(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction) {
  (void)user, (void)wgrad_mode, (void)direction;
  return 1e-6 * (double)rows * (1 + 1e-3 / num_chunks);
}

/* The range of Algorithm 1 also holds with a machine: candidates lie between the answers of smaller and larger batches,
 * whatever is predicted outside. */
TEST(Adaptive_WithAMachine_TriesBetweenTheAnswersOfNeighbours) {
  static sluice_search_t s;
  sluice_search_config_t config = config_of(SLUICE_TUNER_ADAPTIVE);
  config.predict = likes_many_chunks;
  for (int has_neighbours = 0; has_neighbours < 2; ++has_neighbours) {
    sluice_search_init(&s, &config);
    const int32_t lo = sluice_search_size_of(3), hi = sluice_search_size_of(6);
    if (has_neighbours) sluice_search_answer(&s, 1000, lo), sluice_search_answer(&s, 16000, hi);
    int32_t most = 0, tried = 0;
    for (int step = 0; step < 200; ++step) {
      int32_t pick = sluice_search_next(&s, 4000, NULL), n = sluice_pick_chunks(pick);
      for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
        sluice_search_observe(&s, d, pick, 4000, (uint64_t)(1e3 * (1000 - n)), NULL);
      }
      if (has_neighbours) assert_true(sluice_pick_size(pick) >= lo && sluice_pick_size(pick) <= hi);
      if (n > most) ++tried;
      most = n > most ? n : most;
    }
    assert_int_equal(most, has_neighbours ? 6 : 16);
    assert_true(tried >= 1);
  }
}

static int32_t told;
static void count_decision(void* user, const sluice_search_decision_t* d) {
  (void)user;
  ++told;
  assert_true(d->why > SLUICE_WHY_ON_TRIAL && d->rows == 2048);
}

TEST(Answers_Imported_AreTakenWithoutARace) {
  static sluice_search_t search;
  sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  config.decided = count_decision;
  sluice_search_init(&search, &config);
  told = 0;
  sluice_search_answer(&search, 2048, sluice_search_size_of(6));
  int32_t why = 0;
  assert_int_equal(sluice_pick_chunks(sluice_search_next(&search, 2100, &why)), 6);
  assert_int_equal(why, SLUICE_WHY_IMPORTED);
  assert_int_equal(told, 1);
  assert_int_equal(sluice_pick_chunks(sluice_search_next(&search, 0, &why)), 1); /* nothing timed yet */
  assert_int_equal(why, SLUICE_WHY_NOTHING_YET);
}

TEST(Sizes_FixedOrLimited_AreKept) {
  static sluice_search_t search;
  uint32_t seed = 9;
  sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  config.max_size = sluice_search_size_of(4);
  surface_t surface = random_surface(&seed);
  sluice_search_init(&search, &config);
  for (int step = 0; step < 200; ++step) {
    assert_true(sluice_pick_chunks(sluice_search_next(&search, 9000, NULL)) <= 4);
    run_step(&search, &surface, 9000, &seed, 0);
  }
  config.min_size = config.max_size;
  sluice_search_init(&search, &config);
  int32_t why;
  assert_int_equal(sluice_pick_chunks(sluice_search_next(&search, 9000, &why)), 4);
  assert_int_equal(why, SLUICE_WHY_ONE_LEFT);
}

static double per_chunk_is_faster(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction) {
  (void)rows, (void)direction;
  *(int32_t*)user = num_chunks;
  return wgrad_mode == SLUICE_WGRAD_PER_CHUNK ? 1e-3 : 2e-3;
}

/* Two sizes that differ by half an octave. The smaller one is answered first, with one chunk; for the larger one two
 * chunks are faster by `gain`. Returns the answer of the larger one. */
static int32_t chunks_of_the_larger(double gain) {
  static sluice_search_t search;
  static const int64_t sizes[] = {128, 192};
  const sluice_search_config_t config = config_of(SLUICE_TUNER_PROFILE);
  sluice_search_init(&search, &config);
  for (int step = 0; step < 600; ++step) {
    int64_t rows = sizes[step < 200 ? 0 : step % 2];
    int32_t pick = sluice_search_next(&search, rows, NULL), n = sluice_pick_chunks(pick);
    double ns = rows == sizes[0] ? 1000 * n : n == 1 ? 1000 : n == 2 ? 1000 / (1 + gain) : 1000 + 100 * n;
    for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d)
      sluice_search_observe(&search, d, pick, rows, (uint64_t)(ns * (double)rows), NULL);
  }
  assert_int_equal(sluice_pick_chunks(sluice_search_next(&search, sizes[0], NULL)), 1);
  return sluice_pick_chunks(sluice_search_next(&search, sizes[1], NULL));
}

TEST(SizesNearby_TimesThatCouldBeNoise_ShareOneChoice) {
  assert_int_equal(chunks_of_the_larger(0.02), 1);
  assert_int_equal(chunks_of_the_larger(0.05), 2);
}

TEST(Chunks_FixedBetweenSizes_RaceTheirModes) {
  static sluice_search_t search;
  int32_t asked = 0;
  sluice_search_config_t config = config_of(SLUICE_TUNER_MODEL);
  config.min_size = config.max_size = sluice_search_size_of(5), config.fixed_chunks = 5, config.open_wgrad = 1;
  config.predict = per_chunk_is_faster, config.user = &asked;
  sluice_search_init(&search, &config);
  int32_t pick = sluice_search_next(&search, 4096, NULL);
  assert_true(sluice_search_chunks(&search, pick) == 5 && sluice_pick_wgrad(pick) == SLUICE_WGRAD_PER_CHUNK);
  assert_int_equal(asked, 5);
  config.mode = SLUICE_TUNER_ADAPTIVE, config.predict = NULL;
  for (int32_t faster = 0; faster < 2; ++faster) {
    int32_t ran[2] = {0, 0};
    sluice_search_init(&search, &config);
    for (int step = 0; step < 40; ++step) {
      pick = sluice_search_next(&search, 4096, NULL);
      assert_int_equal(sluice_search_chunks(&search, pick), 5);
      ++ran[sluice_pick_wgrad(pick)];
      uint64_t ns = sluice_pick_wgrad(pick) == faster ? 1000000 : 1100000;
      const sluice_lanes_t lanes = {5e5, 4e5, 1e5, 1e4};
      for (int32_t d = 0; d < 2; ++d) sluice_search_observe(&search, d, pick, 4096, ns, &lanes);
    }
    assert_true(ran[0] >= 4 && ran[1] >= 4 && ran[faster] > 25);
    assert_int_equal(sluice_pick_wgrad(sluice_search_next(&search, 4096, NULL)), faster);
  }
}
