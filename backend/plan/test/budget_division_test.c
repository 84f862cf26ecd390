// SPDX-License-Identifier: Apache-2.0
/* The division of a budget among contexts, for given needs. */

#include "backend/plan/budget_division.h"
#include "third_party/bazel/test.h"

/* Two contexts that need 50 and 20 bytes per token, with a first batch of ten tokens. */
static void of_tokens(uint64_t needs[2][SLUICE_BUDGET_SIZES]) {
  for (int32_t size = 0; size < SLUICE_BUDGET_SIZES; ++size) {
    const uint64_t tokens = (uint64_t)sluice_budget_tokens(10, size);
    needs[0][size] = 50 * tokens, needs[1][size] = 20 * tokens;
  }
}

TEST(Tokens_OfEachSize_AreRoundedUp) {
  static const int64_t of_ten[SLUICE_BUDGET_SIZES] = {10, 13, 15, 20, 30, 40, 60, 80};
  for (int32_t size = 0; size < SLUICE_BUDGET_SIZES; ++size)
    assert_int_equal(sluice_budget_tokens(10, size), of_ten[size]);
  assert_int_equal(sluice_budget_tokens(INT32_MAX, 7), INT32_MAX);
}

/* Divided by rows alone, the first context would get 1,000 of 10,000 bytes, less than its 80 tokens need. */
TEST(Division_AllSizesFit_TheRestIsByRows) {
  const uint64_t weights[2] = {1, 9};
  uint64_t needs[2][SLUICE_BUDGET_SIZES], shares[2];
  of_tokens(needs);
  assert_int_equal(sluice_budget_division(10000, 2, weights, SLUICE_BUDGET_SIZES, needs[0], shares), SLUICE_OK);
  assert_int_equal(shares[0], 80 * 50 + 440);
  assert_int_equal(shares[1], 80 * 20 + 3960);
  assert_int_equal(sluice_budget_division(10000, 2, weights, 0, NULL, shares), SLUICE_OK);
  assert_int_equal(shares[0], 1000);
  assert_int_equal(shares[1], 9000);
}

/* For any number of tokens, up to eight times the first, each context gets what it needs if the sum fits. */
TEST(Division_BatchBetweenTwoSizes_FitsWhileTheWholeWouldDo) {
  const uint64_t weights[2] = {1, 9};
  uint64_t needs[2][SLUICE_BUDGET_SIZES], shares[2];
  of_tokens(needs);
  for (uint64_t total = 700; total <= 6000; total += 7) {
    assert_int_equal(sluice_budget_division(total, 2, weights, SLUICE_BUDGET_SIZES, needs[0], shares), SLUICE_OK);
    const uint64_t most = total / 70 < 80 ? total / 70 : 80;
    assert_true(shares[0] >= 50 * most && shares[1] >= 20 * most && shares[0] + shares[1] <= total);
  }
  assert_int_equal(sluice_budget_division(699, 2, weights, SLUICE_BUDGET_SIZES, needs[0], shares),
                   SLUICE_E_OVER_BUDGET);
}

/* Products beyond 64 bits, and a part so small that it rounds to zero. */
TEST(Division_LargeNumbers_AreExact) {
  const uint64_t large = (uint64_t)1 << 53, weights[3] = {large, large, 1};
  uint64_t shares[3];
  assert_int_equal(sluice_budget_division(large - 2, 3, weights, 0, NULL, shares), SLUICE_OK);
  assert_int_equal(shares[0], large / 2 - 2); /* (2^53 - 2) * 2^53 / (2^54 + 1) */
  assert_int_equal(shares[1], large / 2 - 2);
  assert_int_equal(shares[2], 1);
  assert_int_equal(sluice_budget_division(UINT64_MAX, 1, weights, 0, NULL, shares), SLUICE_OK);
  assert_true(shares[0] == UINT64_MAX);
}
