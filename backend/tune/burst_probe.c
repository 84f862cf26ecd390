/* Pairs of exchanges after a pause, over the communicator below a context, for burst.h. */
#include <time.h>

#include "backend/base/clock.h"
#include "backend/tune/burst.h"
#include "backend/tune/probe.h"

static sluice_status_t pair(void* user, int64_t bytes, double pause, double out_seconds[2]) {
  sluice_bench_t* b = user;
  const sluice_probe_t exchange = {.kind = SLUICE_PROBE_EXCHANGE, .size = bytes};
  double barrier = 0;
  const struct timespec idle = {(time_t)pause, (long)((pause - (double)(time_t)pause) * 1e9)};
  (void)nanosleep(&idle, NULL);
  SLUICE_TRY(sluice_bench_longest(b, &barrier, 1));
  for (int32_t i = 0; i < 2; ++i) {
    uint64_t began = sluice_now_ns();
    SLUICE_TRY(sluice_bench_run(b, &exchange, 1));
    out_seconds[i] = (double)(sluice_now_ns() - began) * 1e-9;
  }
  return SLUICE_OK;
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  return sluice_bench_longest(user, seconds, count);
}

sluice_status_t sluice_bench_burst(sluice_bench_t* b, double seconds, sluice_machine_t* machine) {
  if (b->context->comm == NULL) return SLUICE_OK;
  const sluice_burst_source_t source = {pair, longest, b};
  return sluice_burst_measure(&source, seconds, machine);
}
