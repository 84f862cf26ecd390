// SPDX-License-Identifier: Apache-2.0
/* Plans of short chains compared with the exhaustive search and with the partitions that hosts use. 2,000 chains with
 * SLUICE_FULL set, 150 otherwise. */
#include <stdint.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/alloc.h"
#include "backend/planner/stages/plan_stages.h"
#include "backend/planner/stages/test/reference.h"
#include "third_party/bazel/test.h"

enum { FULL_CHAINS = 2000, DAILY_CHAINS = 150, SEED = 32 };

static int32_t num_chains(void) { return getenv("SLUICE_FULL") != NULL ? FULL_CHAINS : DAILY_CHAINS; }

static random_problem_t draw(random_t* random) {
  const int32_t stages = 1 + random_index(random, EXHAUSTIVE_STAGES);
  /* With one stage all layers share the choices: 5 options in 12 layers would be 244 million. */
  const int32_t most = stages == 1 ? 9 : EXHAUSTIVE_LAYERS;
  return random_chain(random, stages + random_index(random, most - stages + 1), stages);
}

static sluice_status_t plan_by(random_problem_t* r, int32_t method) {
  r->problem.method = method;
  return sluice_stages_plan(&r->problem, sluice_process_allocator(), &r->plan);
}

/* Whether two sums of the same numbers in different orders are equal. */
static int is_same(double a, double b) { return fabs(a - b) <= 1e-9 * (a + b); }

/* ---- exact ---- */

TEST(Chains_ByDynamicProgramming_AreTheBestOfAll) {
  random_t random = {SEED};
  int32_t num_feasible = 0;
  for (int32_t c = 0; c < num_chains(); ++c) {
    random_problem_t r = draw(&random);
    const exhaustive_t best = exhaustive_search(&r.problem);
    for (int32_t method = SLUICE_STAGES_AUTO; method <= SLUICE_STAGES_EXACT; ++method) {
      const sluice_status_t status = plan_by(&r, method);
      if (best.slowest < INFINITY) {
        assert_int_equal(status, SLUICE_OK);
        assert_true(is_same(r.plan.slowest_seconds, best.slowest));
        assert_true(r.plan.is_optimal || method == SLUICE_STAGES_AUTO);
        assert_int_equal(r.plan.blocking_stage, -1);
      } else {
        assert_int_equal(status, SLUICE_E_OVER_BUDGET);
        assert_int_equal(r.plan.short_bytes, best.short_bytes);
      }
    }
    num_feasible += best.slowest < INFINITY;
    random_problem_free(&r);
  }
  printf("%d chains, %d of them feasible: all as the exhaustive search\n", num_chains(), num_feasible);
  /* the random chains are both feasible and infeasible */
  assert_in_range(num_feasible, num_chains() / 2, num_chains() * 19 / 20);
}

/* ---- heuristic ---- */

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return x < y ? -1 : x > y;
}

TEST(Chains_ByTheHeuristic_AreNearlyTheBest) {
  random_t random = {SEED + 1};
  static double excess[FULL_CHAINS];
  int32_t count = 0;
  double sum = 0;
  for (int32_t c = 0; c < num_chains(); ++c) {
    random_problem_t r = draw(&random);
    const sluice_status_t exact = plan_by(&r, SLUICE_STAGES_EXACT);
    const double best = r.plan.slowest_seconds;
    assert_int_equal(plan_by(&r, SLUICE_STAGES_HEURISTIC), exact); /* feasible whenever any plan is */
    if (exact == SLUICE_OK) {
      excess[count] = r.plan.slowest_seconds / best - 1;
      assert_true(excess[count] > -1e-9);
      sum += excess[count++];
    }
    random_problem_free(&r);
  }
  qsort(excess, (size_t)count, sizeof *excess, ascending);
  const double mean = sum / count, p99 = excess[count * 99 / 100];
  printf("heuristic over exact, %d chains: mean %.4f, p99 %.4f, worst %.4f\n", count, mean, p99, excess[count - 1]);
  assert_true(mean <= 0.02 && p99 <= 0.08);
}

/* ---- partitions of hosts ---- */

/* The slowest stage of one partition with the same option in every layer; INFINITY: it does not fit. */
static double slowest_of(const sluice_stages_problem_t* p, const int32_t* ends, int32_t option) {
  int32_t options[EXHAUSTIVE_LAYERS], first = 0;
  double slowest = 0;
  for (int32_t i = 0; i < EXHAUSTIVE_LAYERS; ++i) options[i] = option;
  for (int32_t s = 0; s < p->num_stages; first = ends[s++]) {
    uint64_t bytes;
    slowest = fmax(slowest, exhaustive_turn(p, s, first, ends[s], options, &bytes));
    if (bytes > exhaustive_budget(p, s)) return INFINITY;
  }
  return slowest;
}

typedef struct hosts_s {
  double uniform;   /* layers by number, all kept or all recomputed */
  double parameter; /* layers by parameters, likewise */
  double pipedream; /* the best partition with all kept */
  double gpipe;     /* the best partition with all recomputed */
  double best;
} hosts_t;

static uint64_t most_parameters(const sluice_stages_problem_t* p, const int32_t* ends) {
  uint64_t most = 0;
  int32_t first = 0;
  for (int32_t s = 0; s < p->num_stages; first = ends[s++]) {
    uint64_t sum = 0;
    for (int32_t i = first; i < ends[s]; ++i) sum += p->layers[i].parameter_bytes;
    most = sum > most ? sum : most;
  }
  return most;
}

static double kept_or_recomputed(const sluice_stages_problem_t* p, const int32_t* ends) {
  return fmin(slowest_of(p, ends, SLUICE_STAGES_KEEP), slowest_of(p, ends, SLUICE_STAGES_RECOMPUTE));
}

static hosts_t plans_of_hosts(const sluice_stages_problem_t* p) {
  const int32_t n = p->num_layers, stages = p->num_stages;
  hosts_t hosts = {INFINITY, INFINITY, INFINITY, INFINITY, INFINITY};
  int32_t ends[EXHAUSTIVE_STAGES], even[EXHAUSTIVE_STAGES];
  for (int32_t s = 0; s < stages; ++s) even[s] = (s + 1) * n / stages;
  hosts.uniform = kept_or_recomputed(p, even);
  uint64_t fewest = UINT64_MAX;
  for (int32_t s = 0; s < stages; ++s) ends[s] = s == stages - 1 ? n : s + 1;
  for (;;) {
    hosts.pipedream = fmin(hosts.pipedream, slowest_of(p, ends, SLUICE_STAGES_KEEP));
    hosts.gpipe = fmin(hosts.gpipe, slowest_of(p, ends, SLUICE_STAGES_RECOMPUTE));
    const uint64_t most = most_parameters(p, ends);
    if (most < fewest) fewest = most, hosts.parameter = kept_or_recomputed(p, ends);
    int32_t s = stages - 2; /* the next increasing sequence */
    while (s >= 0 && ends[s] == n - (stages - 1 - s)) --s;
    if (s < 0) break;
    ++ends[s];
    for (int32_t later = s + 1; later < stages - 1; ++later) ends[later] = ends[later - 1] + 1;
  }
  hosts.best = fmin(fmin(hosts.uniform, hosts.parameter), fmin(hosts.pipedream, hosts.gpipe));
  return hosts;
}

/* With few more layers than stages there is little to choose, and hosts often have the optimal partition. */
enum { LAYERS_TO_CHOOSE = 4 };

TEST(Chains_BesideWhatHostsDo_AreNeverWorseAndMostlyBetterWhereMemoryIsShort) {
  random_t random = {SEED + 2};
  int32_t num_short[2] = {0}, num_better[2] = {0}, num_alone = 0; /* with few layers to choose from, with more */
  for (int32_t c = 0; c < num_chains(); ++c) {
    random_problem_t r = draw(&random);
    const sluice_status_t status = plan_by(&r, SLUICE_STAGES_AUTO);
    const hosts_t hosts = plans_of_hosts(&r.problem);
    const int more = r.problem.num_layers - r.problem.num_stages >= LAYERS_TO_CHOOSE;
    assert_true(status == SLUICE_OK || hosts.best == INFINITY);
    if (status == SLUICE_OK) {
      assert_true(r.plan.slowest_seconds <= hosts.best * (1 + 1e-9));
      if (hosts.pipedream == INFINITY) {
        ++num_short[more];
        num_better[more] += r.plan.slowest_seconds < hosts.best * (1 - 1e-9);
        num_alone += hosts.best == INFINITY;
      }
    }
    random_problem_free(&r);
  }
  printf("all kept fits nowhere: better in %d of %d chains, with fewer layers in %d of %d; the only plan for %d\n",
         num_better[1], num_short[1], num_better[0], num_short[0], num_alone);
  assert_true(num_short[1] >= num_chains() / 10);
  assert_true(num_better[1] * 100 >= num_short[1] * 95);
}
