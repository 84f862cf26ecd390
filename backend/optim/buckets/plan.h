/* The buckets of a step as data [AxoNN, section on memory; double buffers and the check are our own].
 *
 * A parameter of `count` elements is updated bucket by bucket in slots of fast memory. Of each bucket the states
 * (master and moments) are copied in, its gradients are staged in f32, where a sum over ranks would be formed, the
 * update runs, and the states are copied out. Copies have lanes of their own, so with two slots they run beside the
 * update of the bucket before and after. What an op waits for is derived from the slots that ops read and write. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETS_PLAN_H_
#define SLUICE_BACKEND_OPTIM_BUCKETS_PLAN_H_

#include <stdint.h>

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/optim/buckets/kinds.h"

enum { SLUICE_BUCKET_MAX_SLOTS = 2, SLUICE_BUCKET_MAX_WAITS = 4 };

typedef struct sluice_bucket_op_s {
  int32_t kind, lane; /* SLUICE_LANE_* */
  int32_t bucket, slot;
  int32_t num_waits;
  int32_t waits[SLUICE_BUCKET_MAX_WAITS]; /* ops of other lanes */
} sluice_bucket_op_t;

typedef struct sluice_bucket_plan_s {
  int64_t count, bucket; /* elements: of all, of one bucket; the last bucket is shorter */
  int32_t num_slots;
  int32_t num_ops;
  sluice_bucket_op_t* ops; /* in program order */
} sluice_bucket_plan_t;

/* Bytes of the slots: 16 for each element of a bucket and slot, each of the four arrays aligned up to 64. */
uint64_t sluice_bucket_slot_bytes(int64_t bucket, int32_t num_slots);

/* out_plan: new, sluice_bucket_plan_destroy. bucket >= 1, num_slots 1 or 2. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_bucket_plan_create(int64_t count, int64_t bucket, int32_t num_slots,
                                          sluice_allocator_t* allocator, sluice_bucket_plan_t** out_plan);
void sluice_bucket_plan_destroy(sluice_bucket_plan_t* plan, sluice_allocator_t* allocator); /* accepts NULL */

/* What the checker finds first, in program order. */
enum {
  SLUICE_BUCKET_PROVED = 0,
  SLUICE_BUCKET_OVERWRITTEN, /* `op` and `other` use a slot, one writes it, and nothing orders them */
  SLUICE_BUCKET_FOREIGN,     /* `op` finds in its slot what `other`, of another bucket or kind, left; -1: nothing */
  SLUICE_BUCKET_MISSING      /* `op`: the number of a bucket of which ops are missing or twice there */
};
typedef struct sluice_bucket_finding_s {
  int32_t what, op, other;
} sluice_bucket_finding_t;

/* Proves of any plan that each run of it, however its lanes interleave, updates each bucket once from its own states
 * and gradients. Nothing is assumed of how it was made but that waits point backwards. memory: scratch. Errors:
 * NO_MEMORY, INVALID_ARGUMENT (a wait points forwards). */
sluice_status_t sluice_bucket_plan_check(const sluice_bucket_plan_t* plan, sluice_allocator_t* memory,
                                         sluice_bucket_finding_t* out_finding);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETS_PLAN_H_ */
