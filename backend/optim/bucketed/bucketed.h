// SPDX-License-Identifier: Apache-2.0
/* A step of Adam over many tensors in host memory and over ranks, bucket by bucket. Updates overlap with the sums of
 * gradients [AxoNN, section on the all-reduce; the handshake and the verdict are our own].
 *
 * Ranks first compare their arguments and find the largest gradient of all ranks. If no sum can overflow f32 and
 * nothing is clipped, buckets are updated as soon as their sums arrive. Otherwise all sums are formed and scanned
 * before the first update; they are kept until then, with 4 bytes per element. In both cases a gradient or a sum that
 * is infinite or NaN leaves every parameter, master and moment as it was, on every rank.
 *
 * The states may be in a file (optim/file). Buckets are then read and written during the updates. If a step fails on
 * any rank, parameters are restored from the file, which still has the step before.
 *
 * Sums are formed in rank order, and the norm by pieces of tensors, so results have the same bits for every number of
 * threads, every bucket size and every k; on one rank they have the bits of sluice_adam_step. */
#pragma once

#include "backend/device/device.h"
#include "backend/optim/bucketed/handshake.h"

/* The state that lasts from step to step: staging memory and measurements. */
typedef struct sluice_bucketed_s sluice_bucketed_t;

/* device: a CPU device, borrowed until destroy and used exclusively. */
sluice_status_t sluice_bucketed_create(sluice_device_t* device, sluice_allocator_t* allocator,
                                       sluice_bucketed_t** out_bucketed);
void sluice_bucketed_destroy(sluice_bucketed_t* bucketed); /* accepts NULL */

typedef struct sluice_bucketed_outcome_s {
  sluice_adam_outcome_t adam;
  int64_t chunk;          /* the k of this step */
  int32_t is_decided;     /* 1: all sums were formed before the first update */
  uint64_t staging_bytes; /* of the slots of gradients */
  uint64_t sum_ns, update_ns, copy_in_ns, copy_out_ns, step_ns;
} sluice_bucketed_outcome_t;

/* Collective over step->comm. Arguments are the same on all ranks, except for lines with other communicators.
 * Host-complete. Errors: INVALID_ARGUMENT, NO_MEMORY, MISMATCH (names a rank and the difference), PEER_REFUSED: nothing
 * was changed on any rank. Errors of exchanges, which end the communicator: buckets whose sums had arrived are updated,
 * but none with is_decided or with a file. EXTERNAL (an error of the file; the other ranks return PEER_REFUSED):
 * nothing was changed. */
sluice_status_t sluice_bucketed_step(sluice_bucketed_t* bucketed, const sluice_bucketed_step_t* step,
                                     sluice_bucketed_outcome_t* out_outcome);
