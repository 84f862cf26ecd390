// SPDX-License-Identifier: Apache-2.0
/* Samples of exchanges after a pause, measured on the machine of a context. */
#include <time.h>

#include "backend/calibrate/probe.h"
#include "backend/calibrate/token_bucket.h"

#define NEXT 3

static sluice_status_t sample(void* user, int64_t bytes, double* out_first, double* out_next) {
  sluice_bench_t* b = user;
  const sluice_probe_t exchange = {.kind = SLUICE_PROBE_EXCHANGE, .size = bytes};
  const struct timespec pause = {0, (long)(SLUICE_TOKEN_BUCKET_PAUSE * 1e9)};
  double barrier = 0;
  nanosleep(&pause, NULL); /* a signal that cuts the pause short disturbs one round of several */
  SLUICE_TRY(sluice_bench_longest(b, &barrier, 1));
  SLUICE_TRY(sluice_bench_time(b, &exchange, 1, out_first));
  SLUICE_TRY(sluice_bench_time(b, &exchange, NEXT, out_next));
  *out_next /= NEXT;
  return SLUICE_OK;
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  return sluice_bench_longest(user, seconds, count);
}

sluice_status_t sluice_bench_token_bucket(sluice_bench_t* b, double seconds, double* out_bucket) {
  const sluice_token_bucket_source_t source = {sample, longest, b};
  *out_bucket = 0;
  return b->context->comm == NULL ? SLUICE_OK : sluice_token_bucket_measure(&source, seconds, out_bucket);
}
