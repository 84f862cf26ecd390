// SPDX-License-Identifier: Apache-2.0
/* Corrects a machine by the training steps that ran on it: measured over predicted times of lanes and passes.
 *
 * The newest passes of layers with known costs are stored as they arrive in headers, so all ranks have the same. Two of
 * three give the factors by which GEMMs and exchanges take longer than predicted (medians over passes); the rest of a
 * pass is pass_seconds. Every third pass is held out and gives the error of the corrected machine.
 *
 * Ours: observations correct the model.
 */
#pragma once

#include "backend/cost/cost.h"

#define SLUICE_TIMED_PASSES       48
#define SLUICE_TIMED_PASSES_LEAST 6 /* passes */

typedef struct sluice_timed_pass_s {
  sluice_workload_t work; /* with the tokens and the skew of that pass */
  int32_t num_chunks, wgrad_mode;
  int32_t direction, reserved;
  double seconds;       /* of the slowest rank */
  double compute, comm; /* of its lanes */
} sluice_timed_pass_t;

typedef struct sluice_timed_passes_s {
  int64_t count; /* since the start */
  sluice_timed_pass_t passes[SLUICE_TIMED_PASSES];
} sluice_timed_passes_t;

void sluice_timed_passes_add(sluice_timed_passes_t* passes, const sluice_timed_pass_t* pass);
/* The machine corrected by these passes (NULL: none), with its provenance set. Errors: STATE (too few passes), those of
 * predictions.
 */
sluice_status_t sluice_machine_refine(const sluice_timed_passes_t* passes, const sluice_machine_t* machine,
                                      sluice_machine_t* out_machine);
