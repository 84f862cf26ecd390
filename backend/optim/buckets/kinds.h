/* What an op of a bucket does. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETS_KINDS_H_
#define SLUICE_BACKEND_OPTIM_BUCKETS_KINDS_H_

enum {
  SLUICE_BUCKET_COPY_IN = 0, /* writes the states */
  SLUICE_BUCKET_STAGE,       /* writes the gradients */
  SLUICE_BUCKET_UPDATE,      /* reads the gradients, reads and writes the states */
  SLUICE_BUCKET_COPY_OUT,    /* reads the states */
  SLUICE_BUCKET_NUM_KINDS
};

#endif /* SLUICE_BACKEND_OPTIM_BUCKETS_KINDS_H_ */
