/* What a link sends at once after a pause: the line time that the bucket of a shaper holds.
 *
 * Clouds shape links with token buckets, and so does `tc tbf`. The exchanges of a pass have computation between them,
 * so each finds tokens there, while probes that exchange in a row find none: without it a prediction over such a link
 * is too long, and the more so the shorter its exchanges are.
 *
 * An exchange after a pause runs beside others directly behind it, in rounds: what it takes less is the bucket, if it
 * does so in nearly all rounds. Sizes grow until an exchange takes longer than the bucket lasts.
 *
 * Source: ours.
 */
#ifndef SLUICE_BACKEND_CALIBRATE_TOKEN_BUCKET_H_
#define SLUICE_BACKEND_CALIBRATE_TOKEN_BUCKET_H_

#include "backend/cost/machine.h"

#define SLUICE_TOKEN_BUCKET_PAUSE 4e-3 /* seconds: of larger buckets so much is found */

/* Where samples come from: a machine, or a test. */
typedef struct sluice_token_bucket_source_s {
  /* Seconds of an exchange of `bytes` after the pause, and of each of those directly behind it, in the mean.
   * Collective. */
  sluice_status_t (*sample)(void* user, int64_t bytes, double* out_first, double* out_next);
  /* The longest of all ranks, in place. */
  sluice_status_t (*longest)(void* user, double* seconds, int32_t count);
  void* user;
} sluice_token_bucket_source_t;

/* Seconds of line time, 0 where the link keeps nothing; takes at most about `seconds`. Errors: those of the source. */
sluice_status_t sluice_token_bucket_measure(const sluice_token_bucket_source_t* source, double seconds,
                                            double* out_bucket);

/* Undoes the bucket in an exchange's mean seconds, of `repeats` in a row behind a pause: what one takes where the
 * bucket is empty. */
double sluice_token_bucket_undone(double seconds, int32_t repeats, double bucket);

#endif /* SLUICE_BACKEND_CALIBRATE_TOKEN_BUCKET_H_ */
