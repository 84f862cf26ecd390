// SPDX-License-Identifier: Apache-2.0
#include "backend/base/clock.h"

#include <time.h>

static uint64_t read_clock(clockid_t id) {
  struct timespec t;
  clock_gettime(id, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t sluice_now_ns(void) { return read_clock(CLOCK_MONOTONIC); }
uint64_t sluice_thread_cpu_ns(void) { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

uint64_t sluice_thread_cpu_reading_ns(void) {
  enum { ROUNDS = 16, READINGS = 64 };
  uint64_t least = UINT64_MAX;
  for (int round = 0; round < ROUNDS; ++round) {
    uint64_t begin_ns = sluice_thread_cpu_ns(), end_ns = begin_ns;
    for (int i = 0; i < READINGS; ++i) end_ns = sluice_thread_cpu_ns();
    uint64_t mean = (end_ns - begin_ns) / READINGS;
    if (mean < least) least = mean;
  }
  return least;
}

void sluice_cond_init(pthread_cond_t* cond) {
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(cond, &attr);
  pthread_condattr_destroy(&attr);
}

int sluice_cond_wait_until(pthread_cond_t* cond, pthread_mutex_t* mutex, uint64_t deadline_ns) {
  struct timespec t = {.tv_sec = (time_t)(deadline_ns / 1000000000u), .tv_nsec = (long)(deadline_ns % 1000000000u)};
  return pthread_cond_timedwait(cond, mutex, &t);
}
