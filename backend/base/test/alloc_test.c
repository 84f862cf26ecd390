// SPDX-License-Identifier: Apache-2.0
/* The allocator counts its blocks and rejects allocations beyond its limit. */
#include "backend/base/alloc.h"

#include <stdint.h>
#include <string.h>

#include "backend/base/test/refused.h"

enum { LIMIT = 1024 };

static int calls;
static void* count_and_allocate(void* user, uint64_t bytes) {
  (void)user;
  ++calls;
  return test_malloc((size_t)bytes);
}
static void release(void* user, void* data, uint64_t bytes) {
  (void)user, (void)bytes;
  test_free(data);
}

static void says(sluice_status_t status, const char* text) {
  assert_int_equal(last_error()->status, status);
  if (strstr(last_message(), text) == NULL) fail_msg("%s", last_message());
}

TEST(Allocator_PastItsLimit_IsOverBudgetAndCountsNothing) {
  sluice_allocator_t a;
  sluice_allocator_init(&a, count_and_allocate, release, NULL);
  a.limit = LIMIT, calls = 0;
  void* held = sluice_alloc(&a, 600, "held"); /* 640, in whole lines */
  assert_non_null(held);
  assert_int_equal(a.current_bytes, 640);
  const uint64_t too_many[] = {385, LIMIT, LIMIT + 1, UINT64_MAX - 8, UINT64_MAX};
  for (size_t i = 0; i < sizeof too_many / sizeof too_many[0]; ++i) {
    assert_null(sluice_alloc(&a, too_many[i], "rows"));
    assert_int_equal(sluice_alloc_status(), SLUICE_E_OVER_BUDGET);
    says(SLUICE_E_OVER_BUDGET, "would exceed the memory budget of 1024 (640 in use)");
    assert_int_equal(sluice_allocator_charge(&a, too_many[i], "saved rows"), SLUICE_E_OVER_BUDGET);
    says(SLUICE_E_OVER_BUDGET, "saved rows: ");
    assert_true(a.current_bytes == 640 && a.peak_bytes == 640 && a.num_live == 1 && calls == 1);
  }
  void* rest = sluice_alloc(&a, 384, "what is left");
  assert_non_null(rest);
  assert_true(a.current_bytes == LIMIT && a.peak_bytes == LIMIT);
  assert_int_equal(sluice_allocator_charge(&a, 1, "one more"), SLUICE_E_OVER_BUDGET);
  sluice_free(&a, rest, 384);
  assert_int_equal(sluice_allocator_charge(&a, 384, "what is left"), SLUICE_OK);
  assert_true(a.current_bytes == LIMIT && a.num_live == 1);
  sluice_allocator_discharge(&a, 384);
  sluice_free(&a, held, 600);
  assert_true(a.current_bytes == 0 && a.num_live == 0 && a.peak_bytes == LIMIT);
  sluice_allocator_deinit(&a);
}

/* A host allocator that first collects garbage, which includes memory of Sluice. */
typedef struct host_s {
  sluice_allocator_t* allocator;
  void* garbage;
  int num_locked; /* calls that found the allocator locked */
} host_t;

static void look_at_lock(host_t* host) {
  if (pthread_mutex_trylock(&host->allocator->mutex) != 0) {
    ++host->num_locked;
  } else {
    pthread_mutex_unlock(&host->allocator->mutex);
  }
}
static void* collect_and_allocate(void* user, uint64_t bytes) {
  host_t* host = user;
  look_at_lock(host);
  if (host->num_locked == 0) sluice_free(host->allocator, host->garbage, 64);
  host->garbage = NULL;
  return bytes > LIMIT ? NULL : test_malloc((size_t)bytes);
}
static void look_and_release(void* user, void* data, uint64_t bytes) {
  (void)bytes;
  look_at_lock(user);
  test_free(data);
}

TEST(Allocator_HostFreesWhileItAllocates_CountsBothAndWaitsForNobody) {
  sluice_allocator_t a;
  host_t host = {.allocator = &a};
  sluice_allocator_init(&a, collect_and_allocate, look_and_release, &host);
  void* garbage = sluice_alloc(&a, 64, "what is dropped later");
  host.garbage = garbage;
  void* held = sluice_alloc(&a, 128, "held");
  assert_int_equal(host.num_locked, 0);
  assert_true(a.current_bytes == 128 && a.peak_bytes == 128 && a.num_live == 1);
  assert_null(sluice_alloc(&a, LIMIT + 1, "what the host has not"));
  assert_true(a.current_bytes == 128 && a.peak_bytes == 128 && a.asked_bytes == 0);
  sluice_free(&a, held, 128);
  assert_int_equal(host.num_locked, 0);
  assert_true(a.current_bytes == 0 && a.num_live == 0);
  sluice_allocator_deinit(&a);
}
