// SPDX-License-Identifier: Apache-2.0
/* The ledger of outstanding forwards: sums, and entries that a graph keeps. */
#include "backend/memory/ledger.h"

#include "backend/base/test/refused.h"

static sluice_ledger_sums_t pool(uint64_t bytes) { return (sluice_ledger_sums_t){bytes, 10 * bytes, 2 * bytes}; }

TEST(Ledger_BuffersComeAndGoInAnyOrder_SumsFollow) {
  sluice_ledger_t ledger;
  sluice_ledger_init(&ledger);
  char buffers[64];
  uint64_t sum = 0;
  for (uint64_t i = 0; i < 64; ++i) {
    const sluice_ledger_sums_t what = pool(i + 1);
    assert_int_equal(sluice_ledger_add(&ledger, &buffers[i], &ledger, &what), SLUICE_OK);
    sum += i + 1;
  }
  for (uint64_t i = 0; i < 64; ++i) {
    const uint64_t at = i * 29 % 64;
    assert_int_equal(sluice_ledger_sums(&ledger).pool, sum);
    assert_int_equal(sluice_ledger_sums(&ledger).promised, 10 * sum);
    assert_int_equal(sluice_ledger_sums(&ledger).promised_pool, 2 * sum);
    sluice_ledger_remove(&ledger, &buffers[at]);
    sluice_ledger_remove(&ledger, &buffers[at]); /* gone already */
    sum -= at + 1;
  }
  assert_int_equal(sluice_ledger_sums(&ledger).promised, 0);
  sluice_ledger_deinit(&ledger);
}

TEST(Ledger_PoolPastItsLimit_IsRefusedAndNotCounted) {
  sluice_ledger_t ledger;
  sluice_ledger_init(&ledger);
  ledger.pool_limit = 100;
  char buffers[2];
  const sluice_ledger_sums_t fits = pool(60), last = pool(40), more = pool(41);
  assert_int_equal(sluice_ledger_add(&ledger, &buffers[0], &ledger, &fits), SLUICE_OK);
  REFUSED(sluice_ledger_add(&ledger, &buffers[1], &ledger, &more), SLUICE_E_OVER_BUDGET,
          "take 60 bytes, and 41 more would exceed the host_memory_budget of 100");
  assert_int_equal(sluice_ledger_add(&ledger, &buffers[1], &ledger, &last), SLUICE_OK);
  assert_int_equal(sluice_ledger_sums(&ledger).pool, 100);
  sluice_ledger_deinit(&ledger);
}

/* After sluice_ledger_keep another buffer may have the same address, and may be removed. */
TEST(Ledger_LineThatIsKept_StaysCountedForGood) {
  sluice_ledger_t ledger;
  sluice_ledger_init(&ledger);
  char buffers[2];
  const sluice_ledger_sums_t kept = pool(60), other = pool(7);
  assert_int_equal(sluice_ledger_add(&ledger, &buffers[0], &ledger, &kept), SLUICE_OK);
  sluice_ledger_keep(&ledger, &buffers[0]);
  sluice_ledger_keep(&ledger, &buffers[1]); /* never added */
  sluice_ledger_keep(&ledger, NULL);
  sluice_ledger_remove(&ledger, &buffers[0]);
  assert_int_equal(sluice_ledger_sums(&ledger).promised, 600);
  assert_int_equal(sluice_ledger_add(&ledger, &buffers[0], &ledger, &other), SLUICE_OK);
  assert_int_equal(sluice_ledger_sums(&ledger).promised, 670);
  sluice_ledger_remove(&ledger, &buffers[0]);
  assert_int_equal(sluice_ledger_sums(&ledger).promised, 600);
  assert_int_equal(sluice_ledger_sums(&ledger).promised_pool, 120);
  sluice_ledger_deinit(&ledger);
}

/* A layer may be destroyed before its buffers, and another layer may get its address. */
TEST(Ledger_Owners_AreKnownWhileTheirBuffersLive) {
  char one, other, buffers[2];
  const sluice_ledger_sums_t step = {.steps = 1};
  sluice_ledger_t ledger;
  sluice_ledger_init(&ledger);
  assert_int_equal(sluice_ledger_add(&ledger, &buffers[0], &one, &step), SLUICE_OK);
  assert_int_equal(sluice_ledger_add(&ledger, &buffers[1], &other, &step), SLUICE_OK);
  sluice_ledger_remove(&ledger, &buffers[0]);
  assert_true(!sluice_ledger_has(&ledger, &one) && sluice_ledger_has(&ledger, &other));
  sluice_ledger_disown(&ledger, &other);
  assert_false(sluice_ledger_has(&ledger, &other));
  assert_int_equal(sluice_ledger_sums(&ledger).steps, 1);
  sluice_ledger_deinit(&ledger);
}
