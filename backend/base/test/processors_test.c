// SPDX-License-Identifier: Apache-2.0
/* The processors that a process may use: its CPU quota and affinity. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_setaffinity */
#endif
#include "backend/base/processors.h"

#include <sched.h>

#include "third_party/bazel/test.h"

TEST(Quota_CpuMax_IsReadOrNone) {
  assert_true(sluice_processors_quota("150000 100000\n") == 1.5);
  assert_true(sluice_processors_quota("50000 100000") == 0.5);
  static const char* const none[] = {"max 100000\n", "-1 100000", "0 100000", "100000 0", "100000", "", "\n", "x"};
  for (size_t i = 0; i < sizeof none / sizeof none[0]; ++i) assert_true(sluice_processors_quota(none[i]) == 0);
}

TEST(Processors_FewerAllowed_AreOthers) {
  char before[64], after[64];
  cpu_set_t own, one;
  assert_int_equal(sched_getaffinity(0, sizeof own, &own), 0);
  sluice_processors_describe(before, sizeof before);
  int allowed = 0, cores = 0, first = 0;
  assert_int_equal(sscanf(before, "%d of %d cores", &allowed, &cores), 2);
  assert_int_equal(allowed, CPU_COUNT(&own));
  while (!CPU_ISSET(first, &own)) ++first;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  sluice_processors_describe(after, sizeof after);
  assert_int_equal(sched_setaffinity(0, sizeof own, &own), 0);
  assert_int_equal(strncmp(after, "1 of ", 5), 0);
  if (allowed > 1) assert_string_not_equal(before, after);
}
