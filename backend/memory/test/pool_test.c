// SPDX-License-Identifier: Apache-2.0
/* The pool of offloaded rows: which block a larger step replaces. */
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
