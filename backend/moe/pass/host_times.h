// SPDX-License-Identifier: Apache-2.0
/* CPU time of the calling thread outside of ops: of binding, and of walking the template. Measured while a trace is
 * kept, on a device in host memory. Each reading is a system call of a few hundred nanoseconds, so its cost is counted
 * too: an interval between two readings includes half of each, one in all. */
#pragma once

#include <stdint.h>

#include "backend/base/clock.h"

typedef struct sluice_host_times_s {
  int32_t is_on;
  uint64_t since;        /* the thread's CPU time at the last start */
  uint64_t bind_ns;      /* CPU time between starts and stops */
  uint64_t ops_ns;       /* CPU time of ops on the calling thread, without the time between them */
  uint64_t num_readings; /* readings during binding */
  uint64_t num_op_readings;
  uint64_t op_readings_ns;
} sluice_host_times_t;

static inline void sluice_binding_starts(sluice_host_times_t* times) {
  if (times->is_on) times->since = sluice_thread_cpu_ns();
}

static inline void sluice_binding_stops(sluice_host_times_t* times) {
  if (!times->is_on) return;
  times->bind_ns += sluice_thread_cpu_ns() - times->since;
  ++times->num_readings;
}

/* If an interval is far longer than possible, the thread was descheduled: it then counts as usual_ns. */
static inline uint64_t sluice_unless_far_longer(uint64_t ns, uint64_t usual_ns) {
  enum { FAR_LONGER = 16 };
  return ns < FAR_LONGER * usual_ns ? ns : usual_ns;
}

/* Records a run of ops between two readings that took readings_ns together; half of that falls into the walk. After a
 * GEMM the kernel's code is no longer in the caches, and a reading takes three times usual_ns, the time of a reading
 * that follows another one. Therefore it is measured here. */
static inline void sluice_run_was_read(sluice_host_times_t* times, uint64_t readings_ns, uint64_t usual_ns) {
  ++times->num_op_readings;
  times->op_readings_ns += sluice_unless_far_longer(readings_ns / 2, usual_ns);
}

/* Time between consecutive ops of one run. Counts as walking, capped at most_ns. By the wall clock, which needs no
 * system call and is read around every op anyway. */
static inline uint64_t sluice_between_ops(uint64_t ns, uint64_t usual_ns, uint64_t most_ns) {
  ns = sluice_unless_far_longer(ns, usual_ns);
  return ns < most_ns ? ns : most_ns;
}
