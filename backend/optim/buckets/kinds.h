// SPDX-License-Identifier: Apache-2.0
/* The ops of a step in buckets, and the slots that each op reads and writes. */
#pragma once

#include <stdint.h>

enum {
  SLUICE_BUCKET_COPY_IN = 0, /* writes the states of a bucket */
  SLUICE_BUCKET_STAGE,       /* writes the gradients of a chunk, in f32; sums them over ranks if there are several */
  SLUICE_BUCKET_LOOK,        /* scans the gradients of a chunk */
  SLUICE_BUCKET_DECIDE,      /* reads the results of scans and writes the verdict: whether the step is taken, and the
                                gradient scale */
  SLUICE_BUCKET_UPDATE,      /* reads gradients and verdict, reads and writes the states of a bucket */
  SLUICE_BUCKET_COPY_OUT,    /* reads the states of a bucket */
  SLUICE_BUCKET_NUM_KINDS
};

enum { SLUICE_BUCKET_MAX_WAITS = 4 };

typedef struct sluice_bucket_op_s {
  int32_t kind, lane;            /* SLUICE_LANE_* */
  int32_t line;                  /* of the bucket or chunk */
  int32_t bucket, num_buckets;   /* over all lines */
  int32_t state_slot, grad_slot; /* -1: none */
  int64_t first, count;          /* elements over all lines */
  int64_t grad_at;               /* elements from the beginning of the gradients' slots */
  int32_t num_waits;
  int32_t waits[SLUICE_BUCKET_MAX_WAITS]; /* ops of other lanes */
} sluice_bucket_op_t;

/* Sorts of slots. Which of them each op reads and writes is all that the planner and the checker share. */
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
