// SPDX-License-Identifier: Apache-2.0
/* The buckets of a step as data [AxoNN, sections on memory and on the all-reduce; double buffers, the verdict and the
 * check are our own].
 *
 * Elements are divided into consecutive *lines*: all elements of a line are summed over the same ranks. A line is
 * updated bucket by bucket. The gradients of k buckets, a *chunk*, are staged together in f32, where sums over ranks
 * are formed; then each bucket's states (master and moments) are copied in, updated, and copied out. Copies and sums
 * have lanes of their own: the update of finished buckets overlaps with the sum of the next chunk and, with two slots,
 * with the copies of the bucket before and after. The dependencies of an op are derived from the slots that ops read
 * and write. */
#pragma once

#include <stdint.h>

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/optim/buckets/kinds.h"

enum { SLUICE_BUCKET_MAX_SLOTS = 2 };

/* The parameters of a plan. */
typedef struct sluice_bucket_form_s {
  const int64_t* counts; /* [num_lines] elements */
  int32_t num_lines;
  int32_t num_slots; /* of states: 1, or 2 for copies during updates; 0: states are updated in place, without copies */
  int64_t bucket;    /* elements; a line's last bucket is shorter */
  int64_t chunk;     /* k, buckets; a line's last chunk is shorter */
  int32_t num_grad_slots; /* of chunks: 1, or 2 for sums during updates; 0: gradients are read in place */
  int32_t sums;           /* 1: staging sums over ranks, on the communication lane */
  int32_t decides; /* 1: all chunks are scanned before any bucket is updated, so each has a slot: num_grad_slots is
                      ignored */
} sluice_bucket_form_t;

typedef struct sluice_bucket_plan_s {
  sluice_bucket_form_t form; /* counts: NULL */
  int64_t count;             /* elements of all lines */
  int64_t grad_elements;     /* of all slots of gradients together */
  int32_t num_buckets;
  int32_t num_grad_slots;
  int32_t num_ops;
  sluice_bucket_op_t* ops; /* in program order */
} sluice_bucket_plan_t;

/* Returns the bytes of the slots of states: 12 per element of a bucket and slot, each of the three arrays aligned up to
 * 64. */
uint64_t sluice_bucket_state_bytes(int64_t bucket, int32_t num_slots);
/* Returns the bytes of all slots: those of states, and 4 per element of a slot of gradients. For one line with chunks
 * of one bucket, this is 16 per element of a bucket and slot. */
uint64_t sluice_bucket_plan_bytes(const sluice_bucket_plan_t* plan);

/* out_plan: new, release with sluice_bucket_plan_destroy. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_bucket_plan_create(const sluice_bucket_form_t* form, sluice_allocator_t* allocator,
                                          sluice_bucket_plan_t** out_plan);
void sluice_bucket_plan_destroy(sluice_bucket_plan_t* plan, sluice_allocator_t* allocator); /* accepts NULL */

/* The first finding of the checker, in program order. */
enum {
  SLUICE_BUCKET_PROVED = 0,
  SLUICE_BUCKET_OVERWRITTEN, /* `op` and `other` use the same slot, one writes it, and nothing orders them */
  SLUICE_BUCKET_FOREIGN, /* `op` finds in its slot what `other`, of another bucket or kind, has written; -1: nothing */
  SLUICE_BUCKET_MISSING  /* `op`: a bucket that lacks an op, or has one twice */
};
typedef struct sluice_bucket_finding_s {
  int32_t what, op, other;
} sluice_bucket_finding_t;

/* Proves for any plan: each run of it, however its lanes interleave, updates each bucket once from its own states and
 * gradients and, if the form decides, only after all gradients were scanned. The proof assumes of the plan only that
 * waits point backwards. memory: scratch. Errors: NO_MEMORY, INVALID_ARGUMENT (a wait points forwards). */
sluice_status_t sluice_bucket_plan_check(const sluice_bucket_plan_t* plan, sluice_allocator_t* memory,
                                         sluice_bucket_finding_t* out_finding);
