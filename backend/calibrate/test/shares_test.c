// SPDX-License-Identifier: Apache-2.0
/* Shares from simulated works: the share of speed that each work keeps is known and is recovered. */
#include <math.h>

#include "backend/calibrate/shares.h"
#include "third_party/bazel/test.h"

static int is_near(double a, double b) { return fabs(a - b) <= 1e-9; }

typedef struct truth_s {
  double pair[3][3]; /* [y][x] */
  double all[3];
} truth_t;

/* Computes the end of each work if all begin together, in steps from one end to the next. */
static void run(const truth_t* t, const double* alone, int32_t count, double* out_end) {
  double left[3] = {alone[0], alone[1], count > 2 ? alone[2] : 0}, now = 0;
  int32_t running = count;
  while (running > 0) {
    double speed[3], step = INFINITY;
    for (int32_t y = 0; y < count; ++y) {
      if (left[y] <= 0) continue;
      speed[y] = running == 3 ? t->all[y] : 1;
      for (int32_t x = 0; x < count && running == 2; ++x) {
        if (x != y && left[x] > 0) speed[y] = t->pair[y][x];
      }
      step = fmin(step, left[y] / speed[y]);
    }
    now += step;
    for (int32_t y = 0; y < count; ++y) {
      if (left[y] <= 0) continue;
      left[y] -= step * speed[y];
      if (left[y] < 1e-12) left[y] = 0, out_end[y] = now, --running;
    }
  }
}

static const truth_t truth = {{{1, 0.6, 0.9}, {0.95, 1, 0.8}, {0.7, 0.5, 1}}, {0.55, 0.75, 0.4}};

TEST(SharesOfTwo_KnownSpeeds_AreFoundWhicheverEndsFirst) {
  const double works[][2] = {{1, 1}, {1, 3}, {4, 1}};
  for (int i = 0; i < 3; ++i) {
    double end[3], share[2];
    run(&truth, works[i], 2, end);
    sluice_shares_of_two(works[i], end, share);
    assert_true(is_near(share[0], truth.pair[0][1]) && is_near(share[1], truth.pair[1][0]));
  }
}

TEST(SharesOfThree_KnownSpeeds_AreFoundWhicheverEndsFirst) {
  static const double lengths[] = {1, 2, 5};
  for (int i = 0; i < 27; ++i) {
    const double alone[] = {lengths[i % 3], lengths[i / 3 % 3], lengths[i / 9]};
    double end[3], share[3];
    run(&truth, alone, 3, end);
    sluice_shares_of_three(alone, end, truth.pair, share);
    for (int y = 0; y < 3; ++y) {
      if (!is_near(share[y], truth.all[y])) fail_msg("work %d of case %d: %g, not %g", y, i, share[y], truth.all[y]);
    }
  }
}

TEST(Shares_OfNoise_StayInTheirRange) {
  double share[3];
  const double alone[] = {1, 1, 1}, faster[] = {0.5, 0.6, 0.7}, stopped[] = {100, 101, 102};
  const double pair[3][3] = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}};
  sluice_shares_of_two(alone, faster, share);
  assert_true(share[0] == 1 && share[1] == 1);
  sluice_shares_of_three(alone, stopped, pair, share);
  assert_true(share[0] == SLUICE_LEAST_SHARE && share[1] == SLUICE_LEAST_SHARE && share[2] == SLUICE_LEAST_SHARE);
}
