/* What a pass costs the calling thread beside its ops: CPU time of binding, and of walking the template. Taken while a
 * trace is kept, on a device in host memory; each stamp is a system call of a few hundred nanoseconds. */
#ifndef SLUICE_BACKEND_MOE_HOST_TIMES_H_
#define SLUICE_BACKEND_MOE_HOST_TIMES_H_

#include <stdint.h>

#include "backend/base/clock.h"

typedef struct sluice_host_times_s {
  int32_t is_on;
  uint64_t since;   /* the thread's CPU time at the last start */
  uint64_t bind_ns; /* between starts and stops */
  uint64_t ops_ns;  /* of the ops on the calling thread */
} sluice_host_times_t;

static inline void sluice_binding_starts(sluice_host_times_t* times) {
  if (times->is_on) times->since = sluice_thread_cpu_ns();
}

static inline void sluice_binding_stops(sluice_host_times_t* times) {
  if (times->is_on) times->bind_ns += sluice_thread_cpu_ns() - times->since;
}

#endif /* SLUICE_BACKEND_MOE_HOST_TIMES_H_ */
