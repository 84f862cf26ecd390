// SPDX-License-Identifier: Apache-2.0
/* sluice_route: counts and order of routes. */
#include <stdint.h>

#include "backend/base/alloc.h"
#include "backend/base/test/refused.h"
#include "backend/gate/test/gate_reference.h"
#include "sluice/split.h"

TEST(Route_KMajorI32_SortsByExpertTokenK) {
  /* [K, T] as DeepSpeed has them; token 0: 2, 0; token 1: -1, 2; token 2: 0, -1. */
  int32_t ids[] = {2, -1, 0, 0, 2, -1};
  int64_t counts[4], order[6];
  static const int64_t want_counts[] = {2, 0, 2, 0}, want_order[] = {1, 4, 0, 3, -1, -1};
  test_tensor_t t;
  assert_int_equal(sluice_route(tensor_of(&t, ids, SLUICE_TYPE_INT, 32, 3, 2, 1, 3), 4, counts, order), SLUICE_OK);
  assert_memory_equal(counts, want_counts, sizeof counts);
  assert_memory_equal(order, want_order, sizeof order);
  assert_int_equal(sluice_route(&t.tensor, 4, counts, NULL), SLUICE_OK);
}

TEST(Route_I64RowMajor_EveryRouteOnceInOrder) {
  enum { T = 50, K = 3, E = 7 };
  int64_t ids[T * K], counts[E], order[T * K], at = 0;
  test_tensor_t t;
  for (int i = 0; i < T * K; ++i) ids[i] = (int64_t)((gate_random() + 1) / 2 * (E + 1)) - 1;
  const sluice_tensor_t* tensor = tensor_of(&t, ids, SLUICE_TYPE_INT, 64, T, K, K, 1);
  t.tensor.strides = NULL;
  assert_int_equal(sluice_route(tensor, E, counts, order), SLUICE_OK);
  for (int e = 0; e < E; ++e) {
    int64_t found = 0;
    for (int i = 0; i < T * K; ++i) {
      if (ids[i] != e) continue;
      assert_int_equal(order[at++], i);
      ++found;
    }
    assert_int_equal(counts[e], found);
  }
  for (; at < T * K; ++at) assert_int_equal(order[at], -1);
}

static void assert_refused(const sluice_tensor_t* ids, int32_t experts, int64_t* counts, const char* words) {
  int64_t order[4] = {7, 7, 7, 7};
  REFUSED(sluice_route(ids, experts, counts, order), SLUICE_E_INVALID_ARGUMENT, words);
  for (int i = 0; i < 4; ++i) assert_int_equal(order[i], 7); /* no effect */
}

TEST(Route_BadArguments_AreRefusedByName) {
  int32_t ids[4] = {0, 1, 2, 3};
  int64_t counts[4];
  float reals[4];
  test_tensor_t t, f;
  const sluice_tensor_t* good = tensor_of(&t, ids, SLUICE_TYPE_INT, 32, 2, 2, 2, 1);
  assert_refused(NULL, 4, counts, "expert_ids: tensor is NULL");
  assert_refused(good, 0, counts, "num_experts is 0");
  assert_refused(good, 4, NULL, "out_rows_per_expert");
  assert_refused(good, 3, counts, "expert_ids[1, 1] is 3");
  ids[2] = -2;
  assert_refused(good, 4, counts, "expert_ids[1, 0] is -2");
  assert_refused(REAL_2D(&f, reals, 2, 2, 2), 4, counts, "dtype is f32");
}

TEST(Route_AllocationFails_NoEffectNoLeak) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  int32_t ids[2] = {0, 1};
  int64_t counts[2] = {5, 5};
  test_tensor_t t;
  uint64_t live = allocator->num_live;
  allocator->fail_after = 0;
  assert_int_equal(sluice_route(tensor_of(&t, ids, SLUICE_TYPE_INT, 32, 2, 1, 1, 1), 2, counts, NULL),
                   SLUICE_E_NO_MEMORY);
  allocator->fail_after = -1;
  assert_true(counts[0] == 5 && allocator->num_live == live);
}
