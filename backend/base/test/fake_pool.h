// SPDX-License-Identifier: Apache-2.0
/* A pool of threads for tests. It runs as many parts as requested, or one fewer, one after another, the last first. */
#pragma once

#include "backend/base/threads.h"
#include "third_party/bazel/test.h"

static int pool_max = 1, pool_fewer, pool_inside; /* set by tests; inside: the caller is in a parallel region */
static int pool_asked, pool_given, pool_index;
static int fake_max(void) { return pool_max; }
static int fake_given(void) { return pool_given; }
static int fake_index(void) { return pool_index; }
static int fake_inside(void) { return pool_inside; }
static void fake_parallel(void (*fn)(void* data), void* data, unsigned threads, unsigned flags) {
  assert_int_equal(flags, 0);
  pool_asked = (int)threads;
  pool_given = pool_fewer ? pool_asked - 1 : pool_asked;
  for (pool_index = pool_given - 1; pool_index >= 0; --pool_index) fn(data);
}
static const sluice_threads_t fake_pool = {fake_parallel, fake_max, fake_given, fake_index, fake_inside};
