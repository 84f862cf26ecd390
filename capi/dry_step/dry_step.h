// SPDX-License-Identifier: Apache-2.0
/* Runs one training step of a layer on the fake driver, on any CPU, and records the engine's GPU calls as data.
 *
 * Ranks are threads, each with its own fake device. The experts of a token are random and distinct, and repeat with the
 * seed. Warm-up steps run first. Then the calls of one forward and backward are recorded. */
#pragma once

#include <stdio.h>

#include "capi/src/context_on_device.h"

enum { SLUICE_DRY_MOST_RANKS = 8 };

/* Gated experts in bf16, gate and up in one tensor. Pre-activations are saved, and backward sends rows again. */
typedef struct sluice_dry_step_s {
  int64_t ranks, tokens, model_width, hidden_width, experts, top_k, chunks, seed; /* tokens: of each rank */
  int64_t device_bytes;                                                           /* of each device */
  int64_t deduplicate;                                                            /* SLUICE_DEDUPLICATE_* */
  int32_t is_transposed; /* parameters are stored [in, out], gate and up in one tensor [in, 2 out] */
} sluice_dry_step_t;

/* Writes the events of all ranks to `out` as JSON (backend/device/cuda/fake/fake_record.h). The record stays until the
 * next run. Not thread-safe. Errors: INVALID_ARGUMENT (names the number and its bounds), NO_MEMORY (the device is too
 * small, or this machine cannot reserve the address space; with the remedy), or the engine's. */
sluice_status_t sluice_dry_step_run(const sluice_dry_step_t* step, FILE* out);
