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
#include "backend/device/device.h"

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

/* ---- plans ---- */

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

/* ---- the duration of a plan, from prices of ops: each lane runs in order, and lanes run concurrently ---- */

/* The price of an op of each kind. */
typedef struct sluice_bucket_prices_s {
  double seconds[SLUICE_BUCKET_NUM_KINDS], seconds_per_element[SLUICE_BUCKET_NUM_KINDS];
} sluice_bucket_prices_t;

/* out_seconds: the time at which the last op ends. allocator: scratch. Errors: NO_MEMORY. */
sluice_status_t sluice_bucket_simulate(const sluice_bucket_plan_t* plan, const sluice_bucket_prices_t* prices,
                                       sluice_allocator_t* allocator, double* out_seconds);

/* All buckets in one chunk. */
#define SLUICE_BUCKET_ALL INT64_MAX

enum { SLUICE_BUCKET_NUM_CHUNKS = 4 };
/* The values of k that are compared [AxoNN, Fig. 8]: 1, 2, 4 and all. */
extern const int64_t sluice_bucket_chunks[SLUICE_BUCKET_NUM_CHUNKS];

/* Returns the one of those k whose plan is fastest, the smaller if equal; `otherwise` if memory does not suffice to
 * find out. form->chunk is ignored. */
int64_t sluice_bucket_best_chunk(const sluice_bucket_form_t* form, const sluice_bucket_prices_t* prices,
                                 sluice_allocator_t* allocator, int64_t otherwise);

/* ---- running a plan over the lanes of a device ---- */

/* A slot of states: three arrays with the elements of a bucket. All NULL if the plan has no slots. */
typedef struct sluice_bucket_slot_s {
  float *master, *exp_avg, *exp_avg_sq;
} sluice_bucket_slot_t;

/* The bucket or chunk of an op: elements [first, first + count) of all lines, and their slots. */
typedef struct sluice_bucket_part_s {
  int64_t first, count;
  int32_t line;
  sluice_bucket_slot_t slot;
  float* grad;  /* [count], staged; NULL if the plan stages nothing */
  float* grads; /* the first slot of gradients */
} sluice_bucket_part_t;

/* The implementation of ops, by kind: where states come from and go to, and how they are updated. NULL for kinds that
 * its plans do not have. */
typedef struct sluice_bucket_mode_s {
  sluice_status_t (*ops[SLUICE_BUCKET_NUM_KINDS])(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part);
  uint8_t runs_on_failure[SLUICE_BUCKET_NUM_KINDS]; /* 1: it runs after a failure, because other ranks wait for it; if
                                                       it fails itself, the run ends */
} sluice_bucket_mode_t;

/* memory: sluice_bucket_plan_bytes() bytes that the mode's ops can access. Errors: of the device, and of the first op
 * that fails. After a failure only the ops with runs_on_failure run; earlier buckets have been updated. */
sluice_status_t sluice_bucket_run(sluice_device_t* device, const sluice_bucket_plan_t* plan, void* memory,
                                  const sluice_bucket_mode_t* mode, void* user, sluice_stream_t stream);
