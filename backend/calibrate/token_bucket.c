// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/token_bucket.h"

#include "backend/cost/fit.h"

#define ROUNDS 7
#define SHORT  5e-4 /* seconds: shorter exchanges are too noisy */
#define LEAST  0.1  /* of an exchange: a smaller gain after a pause is noise */
#define FIRST  ((int64_t)1 << 12)
#define LAST   ((int64_t)8 << 20)

typedef struct rounds_s {
  double gain, least; /* gain of the first exchange: the median of the rounds, and their lower quartile */
  double next;
} rounds_t;

static sluice_status_t run_rounds(const sluice_token_bucket_source_t* source, int64_t bytes, int32_t count,
                                  rounds_t* out) {
  double gains[ROUNDS], next[ROUNDS], first = 0;
  for (int32_t i = 0; i < count; ++i) {
    SLUICE_TRY(source->sample(source->user, bytes, &first, &next[i]));
    gains[i] = next[i] - first;
  }
  double found[] = {sluice_median(gains, count), sluice_quantile(gains, count, 0.25), sluice_median(next, count)};
  /* negative gains stay negative, so that all ranks take the same branch */
  SLUICE_TRY(source->longest(source->user, found, 3));
  *out = (rounds_t){found[0], found[1], found[2]};
  return SLUICE_OK;
}

sluice_status_t sluice_token_bucket_measure(const sluice_token_bucket_source_t* source, double seconds,
                                            double* out_bucket) {
  rounds_t r = {0};
  *out_bucket = 0;
  for (int64_t bytes = FIRST; bytes <= LAST; bytes *= 2) {
    SLUICE_TRY(run_rounds(source, bytes, 1, &r));
    if (r.next < SHORT) continue;
    if (ROUNDS * (SLUICE_TOKEN_BUCKET_PAUSE + 4 * r.next) > seconds) return SLUICE_OK;
    SLUICE_TRY(run_rounds(source, bytes, ROUNDS, &r));
    if (r.least < LEAST * r.next) return SLUICE_OK;
    *out_bucket = r.gain;
    if (r.gain < r.next / 2) return SLUICE_OK; /* else the bucket may last longer than an exchange of that size */
  }
  return SLUICE_OK;
}

double sluice_token_bucket_undone(double seconds, int32_t repeats, double bucket) {
  return seconds + bucket / (repeats > 0 ? repeats : 1);
}
