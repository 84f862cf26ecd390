// SPDX-License-Identifier: Apache-2.0
/* Divisions into runs compared with all divisions. */
#include <stdint.h>

#include <math.h>

#include "backend/planner/stages/partition/runs.h"
#include "backend/planner/stages/test/random_problem.h"
#include "third_party/bazel/test.h"

enum { NUM_ROWS = 3000, LENGTH = 10, STAGES = 4 };

typedef struct row_s {
  int32_t length;
  int32_t num_stages;
  double floor[STAGES][LENGTH + 1]; /* sums before each place */
  double limit[STAGES];             /* longer runs are impossible */
  double cost[STAGES][LENGTH + 1][LENGTH + 1];
  int64_t num_asked;
} row_t;

static double floor_of(void* user, int32_t stage, int32_t first, int32_t end) {
  const row_t* row = user;
  const double floor = row->floor[stage][end] - row->floor[stage][first];
  return floor > row->limit[stage] ? INFINITY : floor;
}

static double cost_of(void* user, int32_t stage, int32_t first, int32_t end, double cap) {
  row_t* row = user;
  ++row->num_asked;
  const double cost = row->cost[stage][first][end];
  return cost < cap ? cost : INFINITY; /* at or above the cap any value is valid */
}

static row_t draw(random_t* random) {
  row_t row = {.num_stages = 1 + random_index(random, STAGES)};
  row.length = row.num_stages + random_index(random, LENGTH - row.num_stages + 1);
  for (int32_t s = 0; s < row.num_stages; ++s) {
    row.limit[s] = random_index(random, 3) == 0 ? random_between(random, 0, 6) : INFINITY;
    for (int32_t i = 0; i < row.length; ++i) {
      const double value = random_index(random, 8) == 0 ? 0 : random_between(random, 0, 2);
      row.floor[s][i + 1] = row.floor[s][i] + value;
    }
    for (int32_t first = 0; first < row.length; ++first) {
      for (int32_t end = first + 1; end <= row.length; ++end) {
        row.cost[s][first][end] = random_index(random, 6) == 0
                                      ? INFINITY
                                      : floor_of(&row, s, first, end) + fmax(0, random_between(random, -1, 1));
      }
    }
  }
  return row;
}

static double best_of_all(const row_t* row) {
  double reached[LENGTH + 1];
  for (int32_t i = 0; i <= row->length; ++i) reached[i] = i == 0 ? 0 : INFINITY;
  for (int32_t s = 0; s < row->num_stages; ++s) {
    double next[LENGTH + 1];
    for (int32_t end = 0; end <= row->length; ++end) {
      next[end] = INFINITY;
      for (int32_t first = 0; first < end; ++first) {
        next[end] = fmin(next[end], fmax(reached[first], row->cost[s][first][end]));
      }
    }
    for (int32_t i = 0; i <= row->length; ++i) reached[i] = next[i];
  }
  return reached[row->length];
}

/* The cap of a greedy division changes nothing; if greedy finds a division below a cap, one exists. */
static void check_greedy_first(const sluice_runs_t* runs, const int32_t* ends, double worst) {
  sluice_runs_t greedy = *runs;
  greedy.are_costs_free_of_caps = 1;
  int32_t other_ends[STAGES], is_found;
  double other_worst;
  assert_int_equal(sluice_runs_divide(&greedy, sluice_process_allocator(), other_ends, &other_worst), SLUICE_OK);
  assert_true(other_worst == worst);
  if (worst < INFINITY) assert_memory_equal(other_ends, ends, (size_t)runs->num_stages * sizeof *ends);
  const double cap = worst < INFINITY ? nextafter(worst, INFINITY) : 1e9;
  assert_int_equal(sluice_runs_reach(runs, sluice_process_allocator(), worst, &is_found), SLUICE_OK);
  assert_int_equal(is_found, 0);
  assert_int_equal(sluice_runs_reach(runs, sluice_process_allocator(), cap, &is_found), SLUICE_OK);
  assert_true(!is_found || worst < INFINITY);
}

TEST(Divide_AnyRow_IsTheBestOfAllDivisions) {
  random_t random = {11};
  int32_t num_impossible = 0;
  for (int32_t c = 0; c < NUM_ROWS; ++c) {
    row_t row = draw(&random);
    const sluice_runs_t runs = {&row, row.length, row.num_stages, floor_of, cost_of};
    int32_t ends[STAGES];
    double worst;
    assert_int_equal(sluice_runs_divide(&runs, sluice_process_allocator(), ends, &worst), SLUICE_OK);
    assert_true(worst == best_of_all(&row));
    check_greedy_first(&runs, ends, worst);
    num_impossible += worst == INFINITY;
    if (worst == INFINITY) continue;
    double found = 0;
    for (int32_t s = 0; s < row.num_stages; ++s) {
      const int32_t first = s == 0 ? 0 : ends[s - 1];
      assert_true(ends[s] > first);
      found = fmax(found, row.cost[s][first][ends[s]]);
    }
    assert_int_equal(ends[row.num_stages - 1], row.length);
    assert_true(found == worst);
  }
  assert_in_range(num_impossible, NUM_ROWS / 100, NUM_ROWS / 2);
}

static double length_of(void* user, int32_t stage, int32_t first, int32_t end) {
  (void)stage, (void)user;
  return end - first;
}

static double length_cost(void* user, int32_t stage, int32_t first, int32_t end, double cap) {
  (void)stage, (void)cap;
  ++((row_t*)user)->num_asked;
  return end - first;
}

/* 1,024 equal entries have half a million runs on each of 64 stages. */
TEST(Divide_ALongRowWithGoodFloors_AsksForFewRuns) {
  row_t row = {0};
  int32_t ends[64];
  double worst;
  const sluice_runs_t runs = {&row, 1024, 64, length_of, length_cost};
  assert_int_equal(sluice_runs_divide(&runs, sluice_process_allocator(), ends, &worst), SLUICE_OK);
  assert_true(worst == 16);
  assert_true(row.num_asked <= 1024);
}
