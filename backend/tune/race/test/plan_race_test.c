// SPDX-License-Identifier: Apache-2.0
/* Races of plans on simulated times: the winner, the cost of the race, and inputs that must not decide it. */
#include <math.h>

#include "backend/tune/race/plan_race.h"
#include "third_party/bazel/test.h"

static uint32_t next_random(uint32_t* seed) { return (*seed = *seed * 1664525u + 1013904223u) >> 8; }

static uint64_t noisy_ns(double seconds, uint32_t* seed, double noise) {
  double u = (next_random(seed) + 1) / 16777217.0;
  return (uint64_t)(seconds * (1 - noise * log(u)) * 1e9);
}

static sluice_plan_race_t begin(int32_t count) {
  sluice_plan_race_t race;
  sluice_racing_plan_t plans[SLUICE_RACE_PLANS];
  for (int32_t i = 0; i < count; ++i) plans[i] = (sluice_racing_plan_t){i + 1, 0, 0, 0};
  sluice_plan_race_start(&race, plans, count);
  return race;
}

/* Steps until the race is settled; *out_spent: their seconds over those of the best plan. */
static int32_t run(sluice_plan_race_t* race, const double* seconds, double noise, uint32_t* seed, double* out_excess) {
  double best = INFINITY;
  for (int32_t p = 0; p < race->count; ++p) best = fmin(best, seconds[p]);
  int32_t steps = 0;
  *out_excess = 0;
  while (!race->is_settled && steps < 1000) {
    int32_t plan = sluice_plan_race_next(race);
    for (int32_t d = 0; d < 2; ++d) {
      sluice_plan_race_observe(race, d, plan, 4096, noisy_ns(seconds[plan] / 2, seed, noise));
    }
    *out_excess += seconds[plan] / best - 1;
    ++steps;
  }
  return steps;
}

TEST(Race_Noisy_TakesOneNearTheBestInFewSteps) {
  uint32_t seed = 3;
  double regrets = 0, worst = 0, excess = 0;
  int32_t most = 0;
  for (int i = 0; i < 500; ++i) {
    double seconds[SLUICE_RACE_PLANS], best = INFINITY, spent = 0;
    for (int32_t p = 0; p < SLUICE_RACE_PLANS; ++p) {
      seconds[p] = 1e-2 * (1 + 0.4 * next_random(&seed) / 16777216.0);
      best = fmin(best, seconds[p]);
    }
    sluice_plan_race_t race = begin(SLUICE_RACE_PLANS);
    int32_t steps = run(&race, seconds, 0.05, &seed, &spent);
    double regret = seconds[race.pick] / best - 1;
    if (steps > most) most = steps;
    regrets += regret, worst = fmax(worst, regret), excess += spent;
    assert_true(race.is_settled && sluice_plan_race_seconds(&race, race.pick) >= seconds[race.pick]);
  }
  printf("4 plans within 40 %%, 5 %% noise: regret mean %.2f %%, worst %.1f %%; %d steps at most, costing %.2f\n",
         regrets / 5, 100 * worst, most, excess / 500);
  assert_true(regrets / 500 <= 0.01 && worst <= 0.12 && most <= 16 && excess / 500 <= 2);
}

TEST(Race_ClearlySlowerPlan_RunsOneCountedStep) {
  uint32_t seed = 1;
  double excess = 0;
  sluice_plan_race_t race = begin(2);
  const double seconds[] = {1e-2, 2e-2};
  int32_t steps = run(&race, seconds, 0, &seed, &excess);
  assert_int_equal(race.pick, 0);
  assert_int_equal(race.counts[1][0], 2);
  assert_true(steps <= 6 && excess <= 2);
  assert_int_equal(sluice_plan_race_second(&race), 1);
}

/* One slow step from a busy core does not eliminate a plan. */
TEST(Race_OneSlowStep_DropsNobody) {
  sluice_plan_race_t race = begin(2);
  int32_t seen[2] = {0};
  while (!race.is_settled && seen[0] + seen[1] < 20) {
    int32_t plan = sluice_plan_race_next(&race);
    double slower = plan == 1 && seen[1] == 1 ? 1.7 : 1; /* its first counted step */
    ++seen[plan];
    for (int32_t d = 0; d < 2; ++d) {
      sluice_plan_race_observe(&race, d, plan, 4096, (uint64_t)((plan == 0 ? 1e7 : 9e6) * slower));
    }
  }
  assert_true(race.is_settled && race.pick == 1 && seen[1] >= 3);
}

/* Batches of other sizes do not compare plans; if no size repeats, the order of the model stands. */
TEST(Race_OtherSizes_DoNotCount) {
  sluice_plan_race_t race = begin(3);
  sluice_plan_race_observe(&race, 0, 0, 1000, 1000000);
  int32_t seen = 0;
  for (int i = 0; i < 1000 && !race.is_settled; ++i, ++seen) {
    for (int32_t d = 0; d < 2; ++d) sluice_plan_race_observe(&race, d, sluice_plan_race_next(&race), 5000 + i, 10);
    sluice_plan_race_wait(&race, 0);
  }
  assert_true(race.is_settled && race.pick == 0 && seen > 50 && seen < 100);
}

/* Some passes, or all, were not timed on every rank. */
TEST(Race_PassesThatDoNotCount_End) {
  for (int32_t timed = 0; timed < 3; ++timed) { /* backward only, only the first plan's, nothing */
    sluice_plan_race_t race = begin(3);
    int32_t told = 0, steps = 0;
    for (; steps < 1000 && !race.is_settled; ++steps) {
      int32_t plan = sluice_plan_race_next(&race);
      for (int32_t d = 0; d < 2; ++d) {
        if (timed == 0 ? d == 1 : timed == 1 && plan == 0) told += sluice_plan_race_observe(&race, d, plan, 1000, 1000);
      }
      told += sluice_plan_race_wait(&race, 0);
    }
    assert_true(race.is_settled && race.pick == 0 && steps <= 200);
    assert_int_equal(told, 1);
    assert_int_equal(sluice_plan_race_wait(&race, 0), 0);
  }
}

/* Many forwards for each reported backward, as in a pipeline. */
TEST(Race_FewBackwardsTold_BestIsFound) {
  sluice_plan_race_t race = begin(3);
  const double ns[] = {3000, 2000, 2500};
  for (int step = 0; step < 100 && !race.is_settled; ++step) {
    int32_t plan = 0;
    for (int i = 0; i < 24; ++i) {
      plan = sluice_plan_race_next(&race);
      sluice_plan_race_observe(&race, 0, plan, 1000, (uint64_t)ns[plan]);
    }
    sluice_plan_race_observe(&race, 1, plan, 1000, (uint64_t)ns[plan]);
  }
  assert_true(race.is_settled && race.pick == 1);
}

/* Layers share the race. Each gets a choice and reports it two of its forwards later, after all other layers have run.
 * Most layers receive another number of rows, which says nothing about the plans and does not end the race. */
TEST(Race_ManyLayersOfDifferentRouting_BestIsFound) {
  enum { LAYERS = 96, SAME_SIZE = 24, STEPS = 40 };
  static const double ns[] = {4e6, 3e6, 2e6};
  sluice_plan_race_t race = begin(3);
  int32_t ran[LAYERS] = {0}, chosen[LAYERS] = {0}, steps = 0;
  for (; steps < STEPS && !race.is_settled; ++steps) {
    for (int32_t layer = 0; layer < LAYERS; ++layer) {
      int64_t rows = layer < SAME_SIZE ? 1000 : 1000 + 40 * layer;
      for (int32_t d = 0; d < 2 && steps > 0; ++d) {
        sluice_plan_race_observe(&race, d, ran[layer], rows, (uint64_t)ns[ran[layer]]);
      }
      if (steps > 0) sluice_plan_race_wait(&race, layer);
      ran[layer] = chosen[layer]; /* for this forward; the next one runs the new choice */
      chosen[layer] = sluice_plan_race_next(&race);
    }
  }
  assert_true(race.is_settled && race.pick == 2);
  assert_true(sluice_plan_race_seconds(&race, 0) > 0 && sluice_plan_race_seconds(&race, 1) > 0);
}

/* The time of a plan's warm-up, and of later first passes under it, beyond its usual time. */
TEST(Race_FirstPassesUnderAPlan_AreCounted) {
  sluice_plan_race_t race;
  const sluice_racing_plan_t plans[] = {{1, 0, 0, 0}, {2, 0, 0, 0}};
  sluice_plan_race_start(&race, plans, 2);
  for (int step = 0; step < 20 && !race.is_settled; ++step) {
    int32_t plan = sluice_plan_race_next(&race);
    int is_first = race.counts[plan][0] == 0;
    for (int32_t d = 0; d < 2; ++d) sluice_plan_race_observe(&race, d, plan, 1000, is_first ? 5000 : 3000);
  }
  assert_true(race.is_settled && race.switch_ns == 2.0 * 2 * 2000);
  sluice_plan_race_count_switch(&race, 0, 1, 1000, 3500);
  sluice_plan_race_count_switch(&race, 0, 1, 1000, 2000); /* a pass faster than usual costs nothing */
  sluice_plan_race_count_switch(&race, 0, 7, 1000, 9999); /* a plan of another set */
  assert_true(race.switch_ns == 2.0 * 2 * 2000 + 500);
}
