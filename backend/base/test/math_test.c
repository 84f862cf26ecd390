// SPDX-License-Identifier: Apache-2.0
/* Minimum, maximum, division rounded up, and saturating addition. */
#include "backend/base/math.h"

#include "third_party/bazel/test.h"

#define HALF UINT64_C(0x8000000000000000) /* above every int64_t: compares only as unsigned */

TEST(MinMax_OfBothSigns_AreTheSmallerAndTheLarger) {
  assert_true(sluice_min(-1, 1) == -1 && sluice_min(1, -1) == -1 && sluice_min(INT64_MIN, INT64_MAX) == INT64_MIN);
  assert_true(sluice_max(-1, 1) == 1 && sluice_max(1, -1) == 1 && sluice_max(INT64_MIN, INT64_MAX) == INT64_MAX);
  assert_true(sluice_min_u64(HALF, 1) == 1 && sluice_min_u64(1, HALF) == 1);
  assert_true(sluice_max_u64(HALF, 1) == HALF && sluice_max_u64(1, HALF) == HALF);
}

TEST(CeilDiv_AroundAMultiple_CountsTheLastPiece) {
  const int64_t wholes[] = {0, 1, 6, 7, 8, 13, 14, 15}, counts[] = {0, 1, 1, 1, 2, 2, 2, 3};
  for (int i = 0; i < 8; ++i) {
    assert_int_equal(sluice_ceil_div(wholes[i], 7), counts[i]);
    assert_int_equal(sluice_round_up(wholes[i], 7), 7 * counts[i]);
    assert_int_equal(sluice_ceil_div_u64((uint64_t)wholes[i], 7), counts[i]);
    assert_int_equal(sluice_round_up_u64((uint64_t)wholes[i], 7), 7 * counts[i]);
  }
  assert_true(sluice_ceil_div_u64(HALF, 2) == HALF / 2 && sluice_round_up_u64(HALF - 1, 4096) == HALF);
}

TEST(AddSaturating_BeyondTheEnd_StaysThere) {
  assert_true(sluice_add_saturating(2, 3) == 5 && sluice_add_saturating(UINT64_MAX - 3, 3) == UINT64_MAX);
  assert_true(sluice_add_saturating(UINT64_MAX - 3, 4) == UINT64_MAX);
  assert_true(sluice_add_saturating(HALF, HALF) == UINT64_MAX && sluice_add_saturating(UINT64_MAX, 0) == UINT64_MAX);
}
