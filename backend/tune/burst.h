/* Whether the link is behind a token bucket, as shaped links and the networks of rented machines are: what was idle
 * carries so many bytes at once. Probes of small exchanges then see no more than the bucket, and a layer's many small
 * exchanges in a row are none of that.
 *
 * Two exchanges in a row after a pause, in rounds: what the first takes less than the second are the bucket's bytes.
 * The second says what bytes take without it, and no smaller exchange takes less for each byte.
 *
 * Source: ours.
 */
#ifndef SLUICE_BACKEND_TUNE_BURST_H_
#define SLUICE_BACKEND_TUNE_BURST_H_

#include "backend/tune/machine.h"

/* Where samples come from: a machine, or a test. */
typedef struct sluice_burst_source_s {
  /* Seconds of two exchanges of `bytes` in a row, after so many seconds without any. Collective. */
  sluice_status_t (*pair)(void* user, int64_t bytes, double pause, double out_seconds[2]);
  /* The longest of all ranks, in place. */
  sluice_status_t (*longest)(void* user, double* seconds, int32_t count);
  void* user;
} sluice_burst_source_t;

/* Fills in exchange.burst_bytes, and raises the curve, of a machine that has its exchange and world_size; takes about
 * `seconds`. Errors: those of the source. */
sluice_status_t sluice_burst_measure(const sluice_burst_source_t* source, double seconds, sluice_machine_t* machine);

#endif /* SLUICE_BACKEND_TUNE_BURST_H_ */
