// SPDX-License-Identifier: Apache-2.0
#include "capi/test/world/capacity_budgets.h"

#include <stdio.h>
#include <string.h>

#include "capi/test/world/checks.h"

const int32_t capacity_budget_ranks[3] = {1, 2, 4};

case_t capacity_budget_base(void) {
  case_t c = world_small_case();
  c.num_experts = 12, c.bias = 1, c.capacity = 8, c.hidden_width = 64, c.model_width = 24;
  c.tokens[0] = c.tokens[1] = c.tokens[2] = c.tokens[3] = 40;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  return c;
}

case_t capacity_budget_case(const budget_suite_t* suite, int32_t world_size, int32_t bits) {
  case_t c = suite->base;
  c.world_size = world_size, c.num_chunks = 1 + bits % 4, c.gated = bits & 1;
  c.outstanding = 1 + bits % 3;
  c.reuse_saved = bits >> 1 & 1, c.restore = bits >> 2 & 1 && c.outstanding == 1;
  c.dtype = bits % 5 == 4 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
  return c;
}

uint64_t capacity_budget_smallest(const budget_suite_t* suite, const case_t* c) { return budget_smallest(suite, *c); }

/* Checks a layer under budgets. Returns the number of ranks whose peak equals the budget exactly. */
static int32_t check_peak(const budget_suite_t* suite, case_t c, int32_t bits) {
  result_t without, under;
  int32_t exact = 0;
  suite->run(&c, &without);
  must_work(&c, &without);
  c.budget = 1;
  const uint64_t least = capacity_budget_smallest(suite, &c);
  assert_true(least > 1);
  c.budget = least - 1;
  assert_int_equal(capacity_budget_smallest(suite, &c), least);
  for (uint64_t times = 1; times <= 2; ++times) {
    c.budget = times * least;
    suite->run(&c, &under);
    must_work(&c, &under);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_true(under.peak_bytes[r] <= c.budget);
      assert_int_equal(under.report[r].num_dropped, without.report[r].num_dropped);
      assert_true(under.bytes_sent[r] >= without.bytes_sent[r]);
      if (times == 2 || c.restore) continue; /* saved buffers of the host are not rounded up */
      if (under.peak_bytes[r] != least) {
        fail_msg("W %d bits %d rank %d: peak %llu, planned %llu", c.world_size, bits, r,
                 (unsigned long long)under.peak_bytes[r], (unsigned long long)least);
      }
      ++exact;
    }
    /* The leanest plan recomputes chunk by chunk, which changes the bits of weight gradients, but not of outputs. */
    assert_true(world_identical(&c, &under, &without, 0));
    assert_true(world_distance(&c, &under, &without) <= (c.dtype == SLUICE_DTYPE_BF16 ? 1e-2 : 5e-6));
    world_free(&under);
  }
  world_free(&without);
  return exact;
}

void capacity_budget_peak_is_planned(const budget_suite_t* suite) {
  int32_t checked = 0;
  for (int w = 0; w < 3; ++w) {
    for (int32_t bits = 0; bits < (suite->is_slow ? 6 : 16); ++bits) {
      checked += check_peak(suite, capacity_budget_case(suite, capacity_budget_ranks[w], bits), bits);
    }
  }
  printf("planned bytes were the allocator's peak on %d ranks of %d\n", checked, checked);
}

void capacity_budget_more_outstanding_than_said(const budget_suite_t* suite) {
  for (int w = 0; w < (suite->is_slow ? 2 : 3); ++w) {
    case_t c = capacity_budget_case(suite, capacity_budget_ranks[w], 1);
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_KEEP;
    c.outstanding = 2, c.budget = 1;
    c.budget = capacity_budget_smallest(suite, &c);
    c.max_outstanding = 2, c.outstanding = 3;
    result_t got;
    suite->run(&c, &got);
    for (int32_t r = 0; r < c.world_size; ++r) {
      assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
      assert_non_null(strstr(got.message[r], "max_outstanding is 2"));
    }
    world_free(&got);
  }
}
