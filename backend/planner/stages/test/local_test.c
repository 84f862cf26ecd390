// SPDX-License-Identifier: Apache-2.0
/* The choice of options within a stage, compared with an enumeration of all choices. */
#include <stdint.h>

#include <math.h>

#include "backend/planner/stages/local.h"
#include "backend/planner/stages/test/reference.h"
#include "third_party/bazel/test.h"

enum { NUM_STAGES = 2000, MOST_LAYERS = 7, SEED = 5 };

/* A run on the middle of three stages, with links on both sides. */
typedef struct drawn_s {
  random_problem_t r;
  sluice_stages_tables_t tables;
  sluice_stages_local_t local;
  int32_t first;
  int32_t end;
} drawn_t;

static void draw(random_t* random, drawn_t* d) {
  const int32_t count = 1 + random_index(random, MOST_LAYERS);
  d->r = random_chain(random, count + 2, 3);
  d->first = 1, d->end = 1 + count;
  assert_int_equal(sluice_stages_tables_make(&d->r.problem, sluice_process_allocator(), &d->tables), SLUICE_OK);
  assert_int_equal(sluice_stages_local_make(&d->tables, &d->local), SLUICE_OK);
  d->local.most_nodes = UINT64_MAX;
  sluice_stages_local_set_run(&d->local, 1, d->first, d->end);
}

static void drop(drawn_t* d) {
  sluice_stages_local_deinit(&d->local);
  sluice_stages_tables_deinit(&d->tables);
  random_problem_free(&d->r);
}

/* The fastest turn within the budget. */
static double best_of_all(const drawn_t* d) {
  int32_t options[MOST_LAYERS] = {0};
  double best = INFINITY;
  for (;;) {
    uint64_t bytes;
    const double turn = exhaustive_turn(&d->r.problem, 1, d->first, d->end, options, &bytes);
    if (bytes <= exhaustive_budget(&d->r.problem, 1)) best = fmin(best, turn);
    int32_t i = 0;
    while (i < d->end - d->first && ++options[i] == d->r.layers[d->first + i].num_options) options[i++] = 0;
    if (i == d->end - d->first) return best;
  }
}

/* The turn of the answer, by the reference. */
static double turn_of_answer(const drawn_t* d, uint64_t* out_bytes) {
  int32_t options[MOST_LAYERS];
  for (int32_t i = 0; i < d->local.count; ++i) options[i] = d->local.items[d->local.pick[i]].option;
  return exhaustive_turn(&d->r.problem, 1, d->first, d->end, options, out_bytes);
}

TEST(Exact_OfAnyStage_IsTheFastestOfAllChoicesThatFit) {
  random_t random = {SEED + 1};
  int32_t num_searched = 0;
  for (int32_t c = 0; c < NUM_STAGES; ++c) {
    drawn_t d;
    draw(&random, &d);
    const double best = best_of_all(&d);
    assert_int_equal(sluice_stages_local_exact(&d.local, INFINITY), best < INFINITY);
    if (best < INFINITY) {
      uint64_t bytes;
      const double turn = turn_of_answer(&d, &bytes);
      assert_true(fabs(turn - best) <= 1e-9 * best);
      assert_true(fabs(turn - d.local.sum.turn) <= 1e-9 * turn);
      assert_true(bytes <= d.local.budget);
      assert_true(d.local.is_proven);
      num_searched += d.local.sum.compute > 0 && d.local.sum.bytes > d.local.budget / 2;
    }
    drop(&d);
  }
  assert_true(num_searched > NUM_STAGES / 10);
}

TEST(Exact_OutOfNodes_SaysThatNothingIsProven) {
  random_t random = {SEED + 4};
  int32_t num_unproven = 0;
  for (int32_t c = 0; c < NUM_STAGES; ++c) {
    drawn_t d;
    draw(&random, &d);
    d.local.most_nodes = 1;
    if (sluice_stages_local_exact(&d.local, INFINITY)) {
      assert_true(d.local.sum.bytes <= d.local.budget);
      assert_true(!d.local.is_proven || d.local.sum.turn <= best_of_all(&d) * (1 + 1e-9));
      num_unproven += !d.local.is_proven;
    }
    drop(&d);
  }
  assert_true(num_unproven > 0);
}
