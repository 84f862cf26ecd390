// SPDX-License-Identifier: Apache-2.0
/* Which slots each op reads and writes. Used by both the planner and the checker; nothing else is shared between
 * them. */
#pragma once

#include <stdint.h>

#include "backend/optim/buckets/kinds.h"

enum {
  SLUICE_BUCKET_STATES = 0, /* one per slot of states */
  SLUICE_BUCKET_GRADS,      /* one per slot of gradients */
  SLUICE_BUCKET_FOUND,
  SLUICE_BUCKET_VERDICT,
  SLUICE_BUCKET_NUM_ROOMS
};
enum { SLUICE_BUCKET_NOTHING = 0, SLUICE_BUCKET_READS = 1, SLUICE_BUCKET_WRITES = 2 };

/* Indexed by kind and by the sort of slot (`room`). */
static const uint8_t sluice_bucket_accesses[SLUICE_BUCKET_NUM_KINDS][SLUICE_BUCKET_NUM_ROOMS] = {
    [SLUICE_BUCKET_COPY_IN] = {[SLUICE_BUCKET_STATES] = SLUICE_BUCKET_WRITES},
    [SLUICE_BUCKET_STAGE] = {[SLUICE_BUCKET_GRADS] = SLUICE_BUCKET_WRITES},
    [SLUICE_BUCKET_LOOK] = {[SLUICE_BUCKET_GRADS] = SLUICE_BUCKET_READS, [SLUICE_BUCKET_FOUND] = SLUICE_BUCKET_WRITES},
    [SLUICE_BUCKET_DECIDE] =
        {[SLUICE_BUCKET_FOUND] = SLUICE_BUCKET_READS, [SLUICE_BUCKET_VERDICT] = SLUICE_BUCKET_WRITES},
    [SLUICE_BUCKET_UPDATE] = {[SLUICE_BUCKET_STATES] = SLUICE_BUCKET_READS | SLUICE_BUCKET_WRITES,
                              [SLUICE_BUCKET_GRADS] = SLUICE_BUCKET_READS,
                              [SLUICE_BUCKET_VERDICT] = SLUICE_BUCKET_READS},
    [SLUICE_BUCKET_COPY_OUT] = {[SLUICE_BUCKET_STATES] = SLUICE_BUCKET_READS},
};

enum { SLUICE_BUCKET_NO_SLOT = -1 };

/* Returns the slot of sort `room` that an op uses; SLUICE_BUCKET_NO_SLOT: none, for example if states are updated in
 * place. */
static inline int32_t sluice_bucket_slot_of(const sluice_bucket_op_t* op, int32_t room) {
  if (sluice_bucket_accesses[op->kind][room] == SLUICE_BUCKET_NOTHING) return SLUICE_BUCKET_NO_SLOT;
  if (room == SLUICE_BUCKET_STATES) return op->state_slot;
  return room == SLUICE_BUCKET_GRADS ? op->grad_slot : 0;
}
