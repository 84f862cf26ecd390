// SPDX-License-Identifier: Apache-2.0
/* What a pass costs the calling thread beside its ops: CPU time of binding, and of walking the template. Taken while a
 * trace is kept, on a device in host memory; each reading is a system call of a few hundred nanoseconds, so that those
 * which fall into what is counted are counted too: of two readings about something, half of each, one in all. */
#ifndef SLUICE_BACKEND_MOE_PASS_HOST_TIMES_H_
#define SLUICE_BACKEND_MOE_PASS_HOST_TIMES_H_

#include <stdint.h>

#include "backend/base/clock.h"

typedef struct sluice_host_times_s {
  int32_t is_on;
  uint64_t since;        /* the thread's CPU time at the last start */
  uint64_t bind_ns;      /* between starts and stops */
  uint64_t ops_ns;       /* of the ops on the calling thread, without what lies between them */
  uint64_t num_readings; /* of binding */
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

/* Where a stretch took far longer than it can, the thread had to wait for its core: then it counts as usual_ns. */
static inline uint64_t sluice_unless_far_longer(uint64_t ns, uint64_t usual_ns) {
  enum { FAR_LONGER = 16 };
  return ns < FAR_LONGER * usual_ns ? ns : usual_ns;
}

/* A run of ops stood between two readings that took readings_ns together, half of which falls into the walk. Behind a
 * GEMM the kernel's code is no longer in the caches, and a reading takes three times what it does behind another
 * one, usual_ns; so it is measured where it stands. */
static inline void sluice_run_was_read(sluice_host_times_t* times, uint64_t readings_ns, uint64_t usual_ns) {
  ++times->num_op_readings;
  times->op_readings_ns += sluice_unless_far_longer(readings_ns / 2, usual_ns);
}

/* From the end of an op to the begin of the next of its run: walking too, of which there is at most most_ns. By the
 * clock on the wall, which is no system call, and read about every op anyway. */
static inline uint64_t sluice_between_ops(uint64_t ns, uint64_t usual_ns, uint64_t most_ns) {
  ns = sluice_unless_far_longer(ns, usual_ns);
  return ns < most_ns ? ns : most_ns;
}

#endif /* SLUICE_BACKEND_MOE_PASS_HOST_TIMES_H_ */
