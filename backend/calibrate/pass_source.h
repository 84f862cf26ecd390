// SPDX-License-Identifier: Apache-2.0
/* The source of samples of whole passes: a machine (pass_probe.c), or a test. */
#pragma once

#include "backend/cost/cost.h"

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
