// SPDX-License-Identifier: Apache-2.0
/* Fresh ranges are populated by a thread while the caller continues, and no other memory is touched. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RUSAGE_THREAD, sched_setaffinity */
#endif
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/pages_prefault.h"
#include "backend/base/pages_rates.h"
#include "backend/base/processors.h"
#include "third_party/bazel/test.h"

enum { MIB = 1 << 20, BYTES = 32 * MIB };
static const uint64_t DEADLINE_NS = UINT64_C(120) * 1000 * 1000 * 1000; /* the wait ends once all pages are there */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Pages of the address sanitizer's shadow, one byte for eight, that reading the range touches too. */
#ifdef __SANITIZE_ADDRESS__
enum { NOTES = BYTES / 8 / 4096 };
#else
enum { NOTES = 0 };
#endif

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static unsigned char* fresh(void) {
  unsigned char* data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(data != MAP_FAILED);
  (void)madvise(data, BYTES, MADV_NOHUGEPAGE); /* populated page by page */
  return data;
}

static void skip_where_it_cannot(void) {
  unsigned char* data = fresh();
  const int can = madvise(data, page_bytes(), MADV_POPULATE_WRITE) == 0;
  munmap(data, BYTES);
  if (!can) skip_because("this kernel brings no pages in on demand");
  if (sluice_processors_count() < 2) skip_because("one core");
}

static size_t pages_resident(void* data) {
  static unsigned char state[BYTES / 4096];
  const size_t count = BYTES / page_bytes();
  assert_true(mincore(data, BYTES, state) == 0);
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) found += state[i] & 1;
  return found;
}

static void wait_for_all(void* data) {
  const uint64_t begin = sluice_now_ns();
  while (pages_resident(data) < BYTES / page_bytes()) {
    if (sluice_now_ns() - begin > DEADLINE_NS) fail_msg("%zu pages are there", pages_resident(data));
    sched_yield();
  }
}

static long own_faults(void) {
  struct rusage used;
  assert_int_equal(getrusage(RUSAGE_THREAD, &used), 0);
  return used.ru_minflt;
}

static sluice_pages_prefault_t ahead; /* of each case */

static int set_up(void** state) {
  (void)state;
  sluice_pages_prefault_init(&ahead);
  return 0;
}

/* These three cases come first, since they need rates without measurements, which later cases add. */

TEST(Ahead_MoreRangesThanThereIsRoom_LeavesTheRest) {
  skip_where_it_cannot();
  unsigned char* data = fresh();
  for (int i = 0; i < SLUICE_PAGES_PREFAULT_RANGES + 3; ++i) {
    assert_int_equal(sluice_pages_prefault_add(&ahead, data, BYTES), i < SLUICE_PAGES_PREFAULT_RANGES);
  }
  assert_int_equal(ahead.count, SLUICE_PAGES_PREFAULT_RANGES);
  assert_int_equal(ahead.num_measured, SLUICE_PAGES_FIRST);
  munmap(data, BYTES);
}

/* Another thread has written half of the small pages before: no rates can be compared, and the next range is due. */
TEST(Ahead_WhatOthersHaveWritten_SaysNothing) {
  skip_where_it_cannot();
  for (int i = 0; i < SLUICE_PAGES_FIRST + 4; ++i) {
    unsigned char* whole = mmap(NULL, BYTES + 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(whole != MAP_FAILED);
    (void)madvise(whole, BYTES + 2 * MIB, MADV_NOHUGEPAGE);
    unsigned char* data = whole + (2 * MIB - (uintptr_t)whole % (2 * MIB)); /* aligned to a huge page */
    memset(data, 1, BYTES / 2);
    sluice_pages_prefault_init(&ahead);
    assert_true(sluice_pages_prefault_add(&ahead, data, BYTES));
    assert_int_equal(ahead.num_measured, 1);
    sluice_pages_prefault_start(&ahead);
    wait_for_all(data);
    sluice_pages_prefault_stop(&ahead);
    munmap(whole, BYTES + 2 * MIB);
  }
}

/* The thread measures a range, half with each kind of page, until four ranges are measured. Ranges that were stopped
 * early do not count. */
TEST(Ahead_DueRanges_AreMeasuredByTheThread) {
  skip_where_it_cannot();
  int due = 0;
  for (int i = 0; i < SLUICE_PAGES_FIRST + 4; ++i) {
    unsigned char* data = fresh();
    data[5] = 7;
    sluice_pages_prefault_init(&ahead);
    assert_true(sluice_pages_prefault_add(&ahead, data, BYTES));
    assert_int_equal(pages_resident(data), 1); /* the page of data[5] */
    due += ahead.advice[0].next == SLUICE_PAGES_MEASURE;
    sluice_pages_prefault_start(&ahead);
    if (i > 0) wait_for_all(data); /* the first range is stopped at once, most likely before it is populated */
    sluice_pages_prefault_stop(&ahead);
    assert_int_equal(data[5], 7);
    munmap(data, BYTES);
  }
  assert_in_range(due, SLUICE_PAGES_FIRST, SLUICE_PAGES_FIRST + 1);
}

TEST(Ahead_FreshRange_IsPopulatedUnchangedMeanwhile) {
  skip_where_it_cannot();
  unsigned char* data = fresh();
  for (int i = 0; i < 4; ++i) data[(i + 3) * MIB + 5] = (unsigned char)(i + 1);
  const long before = own_faults();
  sluice_pages_prefault_add(&ahead, data, BYTES);
  sluice_pages_prefault_start(&ahead);
  assert_true(ahead.is_running);
  wait_for_all(data);
  sluice_pages_prefault_stop(&ahead);
  for (int i = 0; i < BYTES; ++i) {
    const int in = i % MIB == 5 && i / MIB >= 3 && i / MIB < 7;
    if (data[i] != (in ? i / MIB - 2 : 0)) fail_msg("byte %d is %d", i, data[i]);
  }
  memset(data, 1, BYTES);
  const long faults = own_faults() - before;
#if defined(__SANITIZE_THREAD__)
  printf("%ld faults are not judged: ThreadSanitizer's notes of what this thread reads are among them\n", faults);
#else
  assert_true(faults < 256 + NOTES); /* of 8,192 pages; 256 allows for the thread's own */
#endif
  munmap(data, BYTES);
}

TEST(Ahead_MemoryThatIsThereOrSmall_NeedsNoThread) {
  unsigned char* data = fresh();
  sluice_pages_prefault_add(&ahead, data, SLUICE_PAGES_PREFAULT_LEAST - 1);
  sluice_pages_prefault_add(&ahead, NULL, BYTES);
  memset(data, 1, BYTES);
  sluice_pages_prefault_add(&ahead, data, BYTES);
  sluice_pages_prefault_start(&ahead);
  assert_int_equal(ahead.count, 0);
  assert_false(ahead.is_running);
  sluice_pages_prefault_stop(&ahead);
  munmap(data, BYTES);
}

/* Gradients of separate matrices, as in hosts whose experts are modules of their own. */
TEST(Ahead_ManySmallRanges_AllComeIn) {
  skip_where_it_cannot();
  unsigned char* data = fresh();
  for (int i = 0; i < BYTES / MIB; ++i) sluice_pages_prefault_add(&ahead, data + (size_t)i * MIB, MIB);
  assert_int_equal(ahead.count, BYTES / MIB);
  sluice_pages_prefault_start(&ahead);
  wait_for_all(data);
  sluice_pages_prefault_stop(&ahead);
  munmap(data, BYTES);
}

/* If the first gradients of a pass are in memory, as in the steady state, not all others are checked. */
TEST(Ahead_FirstOnesAreThere_OthersAreNotLookedAt) {
  unsigned char* data = fresh();
  memset(data, 1, 16 * MIB);
  for (int i = 0; i < BYTES / MIB; ++i) sluice_pages_prefault_add(&ahead, data + (size_t)i * MIB, MIB);
  assert_int_equal(ahead.count, 0);
  assert_in_range(ahead.num_there, 1, 15);
  sluice_pages_prefault_init(&ahead);
  for (int i = BYTES / MIB; i-- > 0;) sluice_pages_prefault_add(&ahead, data + (size_t)i * MIB, MIB);
  assert_int_equal(ahead.count, 16); /* the first range is fresh: all are checked */
  munmap(data, BYTES);
}

TEST(Ahead_Stopped_LetsTheMemoryGo) {
  for (int i = 0; i < 50; ++i) {
    unsigned char* data = fresh();
    sluice_pages_prefault_init(&ahead);
    sluice_pages_prefault_add(&ahead, data, BYTES);
    sluice_pages_prefault_start(&ahead);
    sluice_pages_prefault_stop(&ahead);
    munmap(data, BYTES); /* a thread that still ran would access unmapped memory or the next mapping */
    unsigned char* other = fresh();
    assert_int_equal(pages_resident(other), 0);
    munmap(other, BYTES);
  }
}

TEST(Ahead_OneCore_LeavesItToTheCaller) {
  cpu_set_t before, one;
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  unsigned char* data = fresh();
  assert_false(sluice_pages_prefault_add(&ahead, data, BYTES)); /* the caller measures the range if it is due */
  sluice_pages_prefault_start(&ahead);
  assert_false(ahead.is_running);
  sluice_pages_prefault_stop(&ahead);
  assert_int_equal(pages_resident(data), 0);
  munmap(data, BYTES);
  assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
}

int main(void) {
  unsetenv("SLUICE_HUGE_PAGES");
  setenv("SLUICE_CACHE_DIR", "/dev/null", 1); /* no rates from earlier processes */
  return run_cases_each(set_up, NULL);
}
