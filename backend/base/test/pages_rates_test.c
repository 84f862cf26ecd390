// SPDX-License-Identifier: Apache-2.0
/* When fresh memory is measured, and which size of pages is chosen. */

#include "backend/base/pages_rates.h"
#include "third_party/bazel/test.h"

static const double huge_faster[] = {3e-10, 1e-10}, huge_slower[] = {3e-10, 20e-10}, similar[] = {3e-10, 2.9e-10};

static void add(sluice_pages_rate_t* rate, const double* took, int times) {
  for (int i = 0; i < times; ++i) sluice_pages_add(rate, took);
}

TEST(Rates_Sizes_AreSeparate) {
  sluice_pages_rates_t rates;
  memset(&rates, 0, sizeof rates);
  assert_ptr_equal(sluice_pages_rate_of(&rates, SLUICE_PAGES_LARGE), &rates.sizes[0]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, 4 * SLUICE_PAGES_LARGE - 1), &rates.sizes[0]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, 4 * SLUICE_PAGES_LARGE), &rates.sizes[1]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, 64 * SLUICE_PAGES_LARGE), &rates.sizes[3]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, UINT64_MAX), &rates.sizes[3]);
  add(&rates.sizes[1], huge_faster, 1);
  assert_true(sluice_pages_are_better_huge(&rates.sizes[1]));
  assert_false(sluice_pages_are_better_huge(&rates.sizes[0]));
}

TEST(Rates_Better_ByATenthAtLeast) {
  sluice_pages_rate_t rate = {{0, 0}, 0, 0};
  add(&rate, similar, 1);
  assert_false(sluice_pages_are_better_huge(&rate));
  add(&rate, huge_faster, 4);
  assert_true(sluice_pages_are_better_huge(&rate));
}

/* The host sometimes still has the pages, which makes one range fast: it must not outweigh the slow ranges. */
TEST(Rates_ThatChange_AreFollowedAndOneIsNotEnough) {
  sluice_pages_rate_t rate = {{0, 0}, 0, 0};
  add(&rate, huge_slower, 4);
  add(&rate, huge_faster, 1);
  assert_false(sluice_pages_are_better_huge(&rate));
  add(&rate, huge_faster, 9);
  assert_true(sluice_pages_are_better_huge(&rate));
  add(&rate, huge_slower, 1);
  assert_false(sluice_pages_are_better_huge(&rate));
}

TEST(Due_TheFirstFour_ThenOneOfSixteen) {
  sluice_pages_rate_t rate = {{0, 0}, 0, 0};
  for (int i = 0; i < 4; ++i) {
    assert_true(sluice_pages_is_due(&rate));
    add(&rate, huge_faster, 1);
  }
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 15; ++i) assert_false(sluice_pages_is_due(&rate));
    assert_true(sluice_pages_is_due(&rate));
    add(&rate, huge_faster, 1);
  }
}
