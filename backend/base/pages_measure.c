// SPDX-License-Identifier: Apache-2.0
#include "backend/base/pages_measure.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/pages_rates.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* headers may be older than the system */
#endif

enum { FEW = 2, MANY = 8 }; /* sampled pages; each is a system call */

int sluice_pages_are_resident(uintptr_t begin, uintptr_t end) {
  const int places = end - begin < SLUICE_PAGES_LARGE ? FEW : MANY;
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), step = (end - begin) / (uintptr_t)places;
  int found = 0;
  for (int i = 0; i < places; ++i) {
    unsigned char state = 0;
    void* at = (void*)((begin + step * (uintptr_t)i) & ~(page - 1));
    found += mincore(at, page, &state) == 0 && (state & 1) != 0;
  }
  return found > places / 2;
}

int sluice_pages_populate(uintptr_t begin, uintptr_t end) {
  while (madvise((void*)begin, end - begin, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINTR && errno != EAGAIN) return 0;
  }
  return 1;
}

#define HUGE_PAGE ((uintptr_t)2 << 20)
/* Bound on the bytes of a measured range, for each kind of page: more would not improve the result. */
#define MOST_MEASURED ((uintptr_t)256 << 20)
#define PIECE         ((uintptr_t)4 << 20)
/* Stops measuring huge pages that take this many times as long as small ones. */
static const double TOO_SLOW = 2;

typedef enum setting_e { NEVER = 0, ALWAYS, WHERE_FASTER } setting_t;

static setting_t setting;
static pthread_once_t asked = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;     /* of the rates */
static pthread_mutex_t measuring = PTHREAD_MUTEX_INITIALIZER; /* one measurement at a time */
static sluice_pages_rates_t rates;

/* Another thread may hold them during a fork. */
static void reset_in_child(void) {
  pthread_mutex_init(&mutex, NULL);
  pthread_mutex_init(&measuring, NULL);
}

static void ask(void) {
  const char* text = getenv("SLUICE_HUGE_PAGES");
  setting = text == NULL || text[0] == '\0' ? WHERE_FASTER : strcmp(text, "0") == 0 ? NEVER : ALWAYS;
  pthread_atfork(NULL, NULL, reset_in_child);
  if (setting == WHERE_FASTER) sluice_pages_cache_read(&rates);
}

static sluice_pages_next_t next_by_rates(uintptr_t begin, uintptr_t end, int may_measure) {
  pthread_mutex_lock(&mutex);
  sluice_pages_rate_t* rate = sluice_pages_rate_of(&rates, end - begin);
  sluice_pages_next_t next = sluice_pages_are_better_huge(rate) ? SLUICE_PAGES_ASK_HUGE : SLUICE_PAGES_LEAVE;
  if (may_measure && end - begin >= 2 * HUGE_PAGE && !sluice_pages_are_resident(begin, end) &&
      sluice_pages_is_due(rate)) {
    next = SLUICE_PAGES_MEASURE;
  }
  pthread_mutex_unlock(&mutex);
  return next;
}

sluice_pages_range_t sluice_pages_next(const void* data, uint64_t bytes, int may_measure) {
  sluice_pages_range_t range = {.next = SLUICE_PAGES_LEAVE};
  if (data == NULL || bytes < SLUICE_PAGES_LARGE) return range;
  pthread_once(&asked, ask);
  range.begin = ((uintptr_t)data + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
  range.end = ((uintptr_t)data + (uintptr_t)bytes) & ~(HUGE_PAGE - 1);
  if (setting == NEVER || range.end <= range.begin) return range;
  const int before = errno;
  range.next = setting == ALWAYS ? SLUICE_PAGES_ASK_HUGE : next_by_rates(range.begin, range.end, may_measure);
  errno = before;
  return range;
}

void sluice_pages_ask_huge(uintptr_t begin, uintptr_t end) {
  const int before = errno;
  (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE);
  errno = before;
}

/* The time of fresh pages. */
typedef struct cost_s {
  double seconds;
  uintptr_t bytes;
} cost_t;

/* For systems that cannot populate pages: writes their own contents back. */
static void touch(uintptr_t begin, uintptr_t end) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (uintptr_t at = begin; at < end; at += page) __atomic_fetch_or((unsigned char*)at, 0, __ATOMIC_RELAXED);
}

static void bring(cost_t* cost, uintptr_t begin, uintptr_t end, int is_alone) {
  const int is_fresh = !sluice_pages_are_resident(begin, end);
  const uint64_t start = sluice_now_ns();
  if (!sluice_pages_populate(begin, end)) {
    if (!is_alone) return;
    touch(begin, end);
  }
  if (!is_fresh) return;
  cost->seconds += sluice_seconds(sluice_now_ns() - start);
  cost->bytes += end - begin;
}

static int is_set(const atomic_int* is_over) { return is_over != NULL && atomic_load(is_over); }

/* Populates piece by piece; returns the end. */
static uintptr_t bring_pieces(cost_t* cost, uintptr_t begin, uintptr_t end, int huge, double most_seconds,
                              const atomic_int* is_over) {
  while (begin < end && cost->seconds <= most_seconds && !is_set(is_over)) {
    const uintptr_t next = end - begin < PIECE ? end : begin + PIECE;
    if (huge) sluice_pages_ask_huge(begin, next);
    bring(cost, begin, next, is_over == NULL);
    begin = next;
  }
  return begin;
}

static void note(uintptr_t begin, uintptr_t end, uintptr_t done, const cost_t* small, const cost_t* huge) {
  const double took[SLUICE_PAGES_WAYS] = {small->seconds / (double)small->bytes, huge->seconds / (double)huge->bytes};
  pthread_mutex_lock(&mutex);
  sluice_pages_rate_t* rate = sluice_pages_rate_of(&rates, end - begin);
  sluice_pages_add(rate, took);
  if (rate->measured >= SLUICE_PAGES_FIRST) sluice_pages_cache_write(&rates);
  const int is_better = sluice_pages_are_better_huge(rate);
  pthread_mutex_unlock(&mutex);
  if (is_better && done < end) sluice_pages_ask_huge(done, end);
}

void sluice_pages_measure(const sluice_pages_range_t* range, const atomic_int* is_over) {
  if (pthread_mutex_trylock(&measuring) != 0) return;
  const int before = errno;
  uintptr_t each = ((range->end - range->begin) / 2) & ~(HUGE_PAGE - 1);
  if (each > MOST_MEASURED) each = MOST_MEASURED;
  cost_t small = {0}, huge = {0};
  const uintptr_t middle = range->begin + each, most = middle + each;
  uintptr_t done = bring_pieces(&small, range->begin, middle, 0, INFINITY, is_over);
  if (done == middle) done = bring_pieces(&huge, middle, most, 1, TOO_SLOW * small.seconds, is_over);
  const int is_whole = done == most || huge.seconds > TOO_SLOW * small.seconds;
  if (is_whole && small.bytes > 0 && huge.bytes > 0) note(range->begin, range->end, done, &small, &huge);
  errno = before;
  pthread_mutex_unlock(&measuring);
}
