// SPDX-License-Identifier: Apache-2.0
/* A whole step of Adam over many tensors in host memory. It updates everything or nothing.
 *
 * The step scans all gradients before it changes parameters. If any gradient is infinite or NaN, every parameter,
 * master and moment keeps its bytes; the caller then does not advance its step numbers either. */
#pragma once

#include "backend/optim/adam.h"

typedef struct sluice_adam_outcome_s {
  double norm;        /* of the gradients of the loss, before clipping; 0 if they were not scanned */
  float largest;      /* |gradient| as stored; 0 if they were not scanned */
  int32_t is_skipped; /* a gradient was infinite or NaN: nothing was changed */
} sluice_adam_outcome_t;

/* Scans all gradients and changes nothing. The sums are the same for every number of threads. */
sluice_adam_outcome_t sluice_adam_look(const sluice_adam_step_t* step);

/* Computes the same sums from the scans of all pieces, in order. */
sluice_adam_scan_t sluice_adam_fold(const sluice_adam_scan_t* scans, int64_t pieces);

/* Returns the factor that clipping applies to gradients with this norm: torch's clip_grad_norm_, max_norm / (norm +
 * 1e-6), at most 1. */
double sluice_adam_clip_factor(double max_norm, double norm);

/* Checks a step. Errors: INVALID_ARGUMENT naming the group, the tensor and the number. */
sluice_status_t sluice_adam_check_step(const sluice_adam_step_t* step);

/* Runs a step. Errors: INVALID_ARGUMENT naming the group, the tensor and the number; then nothing was changed. */
sluice_status_t sluice_adam_step(const sluice_adam_step_t* step, sluice_adam_outcome_t* out_outcome);
