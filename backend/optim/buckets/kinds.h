/* What an op of a step in buckets does. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETS_KINDS_H_
#define SLUICE_BACKEND_OPTIM_BUCKETS_KINDS_H_

enum {
  SLUICE_BUCKET_COPY_IN = 0, /* writes the states of a bucket */
  SLUICE_BUCKET_STAGE,       /* writes the gradients of a chunk, in f32; sums them over ranks where there are any */
  SLUICE_BUCKET_LOOK,        /* reads the gradients of a chunk and adds what it finds to the tally */
  SLUICE_BUCKET_DECIDE,   /* reads the tally and writes the verdict: whether there is a step, and the norm's factor */
  SLUICE_BUCKET_UPDATE,   /* reads gradients and verdict, reads and writes the states of a bucket */
  SLUICE_BUCKET_COPY_OUT, /* reads the states of a bucket */
  SLUICE_BUCKET_NUM_KINDS
};

#endif /* SLUICE_BACKEND_OPTIM_BUCKETS_KINDS_H_ */
