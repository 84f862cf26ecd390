// SPDX-License-Identifier: Apache-2.0
/* The pool of offloaded rows: reuse, replacement, and reclaim at the allocator's limit. */
#include "backend/memory/pool.h"

#include "third_party/bazel/test.h"

static sluice_allocator_t allocator;
static sluice_pool_t pool;

static void open_pool(int32_t is_host) {
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  sluice_pool_init(&pool, &allocator, is_host);
}

static void close_pool(void) {
  sluice_pool_deinit(&pool);
  assert_int_equal(allocator.current_bytes, 0);
  sluice_allocator_deinit(&allocator);
}

static void* take(uint64_t bytes, uint64_t counts) {
  void* data = NULL;
  uint64_t counted = 0;
  assert_int_equal(sluice_pool_take(&pool, bytes, "test", &data, &counted), SLUICE_OK);
  assert_int_equal(counted, counts);
  assert_int_equal((uintptr_t)data % 64, 0);
  return data;
}

TEST(Pool_StepsOfOneSize_TakeTheSameBlocks) {
  for (int32_t is_host = 0; is_host < 2; ++is_host) {
    open_pool(is_host);
    void *a = take(1000, 1024), *b = take(1000, 1024);
    for (int i = 0; i < 20; ++i) {
      assert_int_equal(sluice_pool_give(&pool, a), 1024);
      assert_int_equal(sluice_pool_give(&pool, b), 1024);
      assert_int_equal(sluice_pool_give(&pool, b), 0); /* no longer held */
      assert_int_equal(sluice_pool_idle_bytes(&pool), 2048);
      assert_int_equal(allocator.current_bytes, 2048);
      a = take(1000, 1024), b = take(900, 1024);
      assert_int_equal(sluice_pool_idle_bytes(&pool), 0);
    }
    assert_int_equal(sluice_pool_num_allocations(&pool), 2);
    sluice_pool_give(&pool, a);
    sluice_pool_give(&pool, b);
    close_pool();
  }
}

TEST(Pool_LargerStep_ReplacesTheLargestIdleBlock) {
  open_pool(0);
  void *small = take(64, 64), *large = take(640, 640);
  sluice_pool_give(&pool, small);
  sluice_pool_give(&pool, large);
  void* larger = take(1280, 1280);
  assert_int_equal(allocator.current_bytes, 64 + 1280);
  assert_ptr_equal(take(10, 64), small);
  sluice_pool_give(&pool, larger);
  sluice_pool_give(&pool, small);
  assert_ptr_equal(take(50, 64), small); /* the smallest that is large enough */
  sluice_pool_give(&pool, small);
  close_pool();
}

TEST(Pool_AllocatorAtItsLimit_IdleBlocksGoFirst) {
  open_pool(1);
  allocator.limit = 2048;
  allocator.reclaim = (void (*)(void*))sluice_pool_reclaim, allocator.reclaim_user = &pool;
  void* data = take(1024, 1024);
  void* rest = sluice_alloc(&allocator, 1024, "rest");
  assert_non_null(rest);
  sluice_free(&allocator, rest, 1024);
  sluice_pool_give(&pool, data);
  rest = sluice_alloc(&allocator, 2048, "all of it");
  assert_non_null(rest);
  assert_int_equal(sluice_pool_idle_bytes(&pool), 0);
  uint64_t counted = 0;
  assert_int_equal(sluice_pool_take(&pool, 64, "one line", &data, &counted), SLUICE_E_OVER_BUDGET);
  assert_null(data);
  sluice_free(&allocator, rest, 2048);
  close_pool();
}

TEST(Pool_HostStillHoldsABlock_IsTheHostsToFree) {
  open_pool(1);
  void* data = take(100, 128);
  sluice_pool_deinit(&pool);
  sluice_free(sluice_process_allocator(), data, 128);
  sluice_allocator_deinit(&allocator);
}
