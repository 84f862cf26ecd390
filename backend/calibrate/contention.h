// SPDX-License-Identifier: Apache-2.0
/* Measures how exchanges and GEMMs slow each other down when they run at the same time, by the size of the exchange.
 *
 * On a core that is busy with GEMMs, the communication lane and the transport's threads wait for the scheduler at each
 * message: milliseconds that an exchange of few rows does not show when it is timed alone, and that do not grow with
 * its bytes. One share for all sizes cannot express both this and the slowdown of large exchanges.
 *
 * Each size runs alone and then during GEMMs, in rounds. Its contention is the median over rounds of the difference
 * between the two, so that a few disturbed rounds do not matter; the maximum over ranks counts. The total time never
 * falls with the size (least squares over pooled neighbours).
 *
 * Source: ours; MPMoE's alpha(y, x) is one number for all sizes.
 */
#pragma once

#include "backend/cost/machine.h"

/* Times of one exchange, in seconds. */
typedef struct sluice_contention_sample_s {
  double alone, busy; /* its time alone, and during GEMMs */
  double lost;        /* lost by the GEMMs that ran with it; negative by noise */
} sluice_contention_sample_t;

/* The source of samples: a machine, or a test. */
typedef struct sluice_contention_source_s {
  /* Runs exchanges of `bytes` for about `seconds` alone and during GEMMs, each with num_second almost empty exchanges
   * in flight. Collective. */
  sluice_status_t (*sample)(void* user, int64_t bytes, int32_t num_second, double seconds,
                            sluice_contention_sample_t* out);
  /* Replaces each time by the maximum over all ranks. */
  sluice_status_t (*longest)(void* user, double* seconds, int32_t count);
  void* user;
} sluice_contention_source_t;

/* Sets exchange_contention, compute_contention and second_* of a machine that has its exchange and world_size; takes
 * about `seconds` and skips sizes that would take too long. Errors: those of the source. */
sluice_status_t sluice_contention_measure(const sluice_contention_source_t* source, double seconds,
                                          sluice_machine_t* machine);
