/* A whole step of Adam over many tensors in host memory: all of it, or nothing.
 *
 * First the gradients are looked at, then parameters change. So a gradient that is infinite or no number, anywhere,
 * leaves every parameter, master and moment as it was, to the byte; the caller then does not advance its numbers of
 * steps either. */
#ifndef SLUICE_BACKEND_OPTIM_ADAM_STEP_H_
#define SLUICE_BACKEND_OPTIM_ADAM_STEP_H_

#include "backend/base/threads.h"
#include "backend/optim/adam.h"

/* Tensors that share their numbers. */
typedef struct sluice_adam_group_s {
  sluice_adam_rule_t rule;
  const sluice_adam_tensor_t* tensors;
  int64_t num_tensors;
} sluice_adam_group_t;

typedef struct sluice_adam_step_s {
  const sluice_adam_group_t* groups;
  int64_t num_groups;
  double loss_scale;   /* gradients are those of the loss times this; 1: of the loss itself */
  double max_norm;     /* clips by the global norm over all groups; 0: not */
  int32_t looks_first; /* 0: gradients are known to be finite; without clipping they are then read once */
  const sluice_adam_kernels_t* kernels;
  const sluice_threads_t* threads;
} sluice_adam_step_t;

typedef struct sluice_adam_outcome_s {
  double norm;        /* of the gradients of the loss, before clipping; 0 where nobody looked */
  float largest;      /* |gradient| as it lies; 0 where nobody looked */
  int32_t is_skipped; /* a gradient was infinite or no number: nothing was changed */
} sluice_adam_outcome_t;

/* Looks at all gradients; changes nothing. The sums are the same for every number of threads. */
sluice_adam_outcome_t sluice_adam_look(const sluice_adam_step_t* step);

/* Errors: INVALID_ARGUMENT naming the group, the tensor and the number; then nothing was changed. */
sluice_status_t sluice_adam_step(const sluice_adam_step_t* step, sluice_adam_outcome_t* out_outcome);

#endif /* SLUICE_BACKEND_OPTIM_ADAM_STEP_H_ */
