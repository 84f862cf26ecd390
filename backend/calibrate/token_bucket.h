// SPDX-License-Identifier: Apache-2.0
/* Measures the burst that a link sends after a pause: the line time in the token bucket of a shaper.
 *
 * Clouds shape links with token buckets, as `tc tbf` does. The exchanges of a pass have computation between them, so
 * each finds tokens, while back-to-back probes find none: without the bucket, a prediction over such a link is too
 * long, the more so the shorter its exchanges are.
 *
 * In each round, an exchange after a pause is compared with the exchanges that follow it directly: the bucket is the
 * time that it saves, if it does so in nearly all rounds. Sizes grow until an exchange takes longer than the bucket
 * lasts.
 *
 * Source: ours.
 */
#pragma once

#include "backend/cost/machine.h"

#define SLUICE_TOKEN_BUCKET_PAUSE 4e-3 /* seconds: larger buckets are reported as this */

/* The source of samples: a machine, or a test. */
typedef struct sluice_token_bucket_source_s {
  /* Seconds of an exchange of `bytes` after the pause, and the mean of those that follow it directly. Collective. */
  sluice_status_t (*sample)(void* user, int64_t bytes, double* out_first, double* out_next);
  /* Replaces each time by the maximum over all ranks. */
  sluice_status_t (*longest)(void* user, double* seconds, int32_t count);
  void* user;
} sluice_token_bucket_source_t;

/* Seconds of line time, 0 if the link has no bucket; takes at most about `seconds`. Errors: those of the source. */
sluice_status_t sluice_token_bucket_measure(const sluice_token_bucket_source_t* source, double seconds,
                                            double* out_bucket);

/* Removes the bucket from the mean seconds of `repeats` consecutive exchanges after a pause: the time of one with an
 * empty bucket. */
double sluice_token_bucket_undone(double seconds, int32_t repeats, double bucket);
