// SPDX-License-Identifier: Apache-2.0
/* The token bucket of simulated links. */
#include <math.h>

#include "backend/calibrate/token_bucket.h"
#include "third_party/bazel/test.h"

typedef struct link_s {
  double bucket, rate; /* seconds of line time, bytes per second */
  double noise;        /* of an exchange, alternating up and down */
  int32_t num_samples;
  sluice_status_t fails;
} made_up_t;

/* Exchanges take 30 us to start, during which the bucket can refill. */
static sluice_status_t sample(void* user, int64_t bytes, double* out_first, double* out_next) {
  made_up_t* l = user;
  const double startup = 3e-5, line = (double)bytes / l->rate;
  const double up = 1 + (++l->num_samples % 2 ? l->noise : -l->noise);
  *out_first = (startup + fmax(0, line - fmin(l->bucket, SLUICE_TOKEN_BUCKET_PAUSE))) * up;
  *out_next = (l->bucket > 0 ? fmax(startup, line) : startup + line) / up;
  return l->fails;
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  (void)user, (void)seconds, (void)count;
  return SLUICE_OK;
}

static double found(made_up_t* l, double seconds) {
  const sluice_token_bucket_source_t source = {sample, longest, l};
  double bucket = -1;
  assert_int_equal(sluice_token_bucket_measure(&source, seconds, &bucket), SLUICE_OK);
  return bucket;
}

TEST(Measure_LinksOfAllSpeeds_FindsTheirBuckets) {
  for (double rate = 8e6; rate < 1e10; rate *= 4) {
    for (double bucket = 2e-4; bucket < 3e-3; bucket *= 2) {
      made_up_t l = {.bucket = bucket, .rate = rate};
      if ((8 << 20) / rate < 3 * bucket) continue; /* longer than the largest exchange */
      assert_true(fabs(found(&l, 10) + 3e-5 - bucket) < 0.1 * bucket);
    }
  }
}

TEST(Measure_NoBucket_IsNone) {
  for (double rate = 2e6; rate < 1e10; rate *= 4) {
    made_up_t l = {.rate = rate, .noise = 0.15};
    assert_true(found(&l, 10) == 0);
  }
}

TEST(Measure_LargerThanThePause_IsThePauseAtMost) {
  made_up_t l = {.bucket = 1, .rate = 1e8};
  assert_true(fabs(found(&l, 10) - SLUICE_TOKEN_BUCKET_PAUSE) < 0.1 * SLUICE_TOKEN_BUCKET_PAUSE);
}

TEST(Measure_TooLong_IsLeftOut) {
  made_up_t l = {.bucket = 4e-4, .rate = 1e5};
  assert_true(found(&l, 0.5) == 0 && l.num_samples <= 2);
}

TEST(Measure_FailingExchange_PassesItOn) {
  made_up_t l = {.rate = 1e8, .fails = SLUICE_E_PEER_LOST};
  const sluice_token_bucket_source_t source = {sample, longest, &l};
  double bucket;
  assert_int_equal(sluice_token_bucket_measure(&source, 1, &bucket), SLUICE_E_PEER_LOST);
}
