/* What a pass costs the calling thread beside its ops: CPU time of binding, and of walking the template. Taken while a
 * trace is kept, on a device in host memory; each reading is a system call of a few hundred nanoseconds, so that those
 * which fall into what is counted are counted too: of two readings about something, half of each, one in all. */
#ifndef SLUICE_BACKEND_MOE_HOST_TIMES_H_
#define SLUICE_BACKEND_MOE_HOST_TIMES_H_

#include <stdint.h>

#include "backend/base/clock.h"

typedef struct sluice_host_times_s {
  int32_t is_on;
  uint64_t since;        /* the thread's CPU time at the last start */
  uint64_t bind_ns;      /* between starts and stops */
  uint64_t ops_ns;       /* of the ops on the calling thread */
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

/* An op stood between two readings that took readings_ns together, half of which falls into the walk. Behind a product
 * the kernel's code is no longer in the caches, and a reading takes three times what it does behind another one,
 * usual_ns; so it is measured where it stands. Where it took far longer, the thread had to wait for its core. */
static inline void sluice_op_was_read(sluice_host_times_t* times, uint64_t readings_ns, uint64_t usual_ns) {
  enum { FAR_LONGER = 16 };
  ++times->num_op_readings;
  times->op_readings_ns += readings_ns < 2 * FAR_LONGER * usual_ns ? readings_ns / 2 : usual_ns;
}

#endif /* SLUICE_BACKEND_MOE_HOST_TIMES_H_ */
