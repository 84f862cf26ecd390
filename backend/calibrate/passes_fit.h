// SPDX-License-Identifier: Apache-2.0
/* Fits the difference between whole passes and the predicted sum of their ops. Probes repeat a single op, while a pass
 * wakes its lanes for each op, meets cold memory and waits for peers between ops.
 *
 * Passes of a layer run with few rows and with many, in one chunk. The ratio of measured to predicted compute lane time
 * corrects GEMMs, by rows and direction. With more rows than a cache holds, the remaining ratio is the cache-miss
 * factor. With few rows passes also run in several chunks: pass_seconds is the excess of one chunk over its prediction,
 * and op_seconds spreads the excess of each further chunk over its ops.
 *
 * Source: ours.
 */
#pragma once

#include "backend/cost/cost.h"

/* The source of samples: a machine (pass_probe.c), or a test. */
typedef struct sluice_passes_source_s {
  /* Seconds of a forward and a backward of num_tokens in n chunks, on this rank, and of their compute lane.
   * Collective. */
  sluice_status_t (*sample)(void* user, int64_t num_tokens, int32_t num_chunks, double out_seconds[2],
                            double out_compute[2]);
  /* Replaces each time by the maximum over all ranks. */
  sluice_status_t (*longest)(void* user, double* seconds, int32_t count);
  void* user;
  sluice_workload_t work; /* of the samples, except for its tokens */
} sluice_passes_source_t;

#define SLUICE_PASSES_FEW  32 /* tokens of each rank */
#define SLUICE_PASSES_MANY 512
#define SLUICE_PASSES_FULL 2048

/* Corrects GEMMs, pass_seconds and op_seconds of an otherwise measured machine; takes about `seconds` and skips passes
 * that would take too long. Errors: those of the source and of predictions. */
sluice_status_t sluice_passes_fit(const sluice_passes_source_t* source, double seconds, sluice_machine_t* machine);
