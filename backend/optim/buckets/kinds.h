// SPDX-License-Identifier: Apache-2.0
/* The ops of a step in buckets. */
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
