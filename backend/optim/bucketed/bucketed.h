// SPDX-License-Identifier: Apache-2.0
/* A step of Adam over many tensors in host memory and over ranks, bucket by bucket, beside the sum of gradients [AxoNN,
 * section on the all-reduce; the handshake and the verdict are our own].
 *
 * Ranks first agree on what they do, and on the largest gradient of all. Where no sum can leave f32, and nothing is
 * clipped, buckets are updated as soon as their sums are there. Else all sums are formed and looked at before the first
 * update: they are kept meanwhile, in 4 bytes an element. Either way a gradient, or a sum, that is infinite or no
 * number leaves every parameter, master and moment as it was, on every rank.
 *
 * States may lie in a file (optim/file): then buckets of them come and go beside the updates, and a step that fails
 * anywhere is given back by the file, which still has the one before.
 *
 * Sums are formed in rank order, and the norm by pieces of tensors, so results have the same bits for every number of
 * threads, every size of buckets and every k; on one rank those of sluice_adam_step. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETED_BUCKETED_H_
#define SLUICE_BACKEND_OPTIM_BUCKETED_BUCKETED_H_

#include "backend/device/device.h"
#include "backend/optim/bucketed/request.h"

/* What lasts from step to step: staging, and what was measured. */
typedef struct sluice_bucketed_s sluice_bucketed_t;

/* device: of the CPU, borrowed until destroy, used by nobody else meanwhile. */
sluice_status_t sluice_bucketed_create(sluice_device_t* device, sluice_allocator_t* allocator,
                                       sluice_bucketed_t** out_bucketed);
void sluice_bucketed_destroy(sluice_bucketed_t* bucketed); /* accepts NULL */

typedef struct sluice_bucketed_outcome_s {
  sluice_adam_outcome_t adam;
  int64_t chunk;          /* k that was taken */
  int32_t is_decided;     /* 1: all sums were formed before the first update */
  uint64_t staging_bytes; /* of the slots of gradients */
  uint64_t sum_ns, update_ns, copy_in_ns, copy_out_ns, step_ns;
} sluice_bucketed_outcome_t;

/* Collective over step->comm, and alike on all its ranks but for lines of other communicators. Host-complete. Errors:
 * INVALID_ARGUMENT, NO_MEMORY, MISMATCH (names a rank and what), PEER_REFUSED: nothing was changed, on any rank; what
 * exchanges return, which ends the communicator: buckets whose sums had come are updated, but none where is_decided, or
 * with a file; EXTERNAL, what the file says, and then PEER_REFUSED on the others: nothing was changed. */
sluice_status_t sluice_bucketed_step(sluice_bucketed_t* bucketed, const sluice_bucketed_step_t* step,
                                     sluice_bucketed_outcome_t* out_outcome);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETED_BUCKETED_H_ */
