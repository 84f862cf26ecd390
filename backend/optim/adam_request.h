// SPDX-License-Identifier: Apache-2.0
/* The arguments of a step: tensors in groups, and the settings that all groups share. Plain data. */
#pragma once

#include "backend/base/threads.h"
#include "backend/optim/adam.h"

/* Tensors with the same settings. */
typedef struct sluice_adam_group_s {
  sluice_adam_rule_t rule;
  const sluice_adam_tensor_t* tensors;
  int64_t num_tensors;
} sluice_adam_group_t;

typedef struct sluice_adam_step_s {
  const sluice_adam_group_t* groups;
  int64_t num_groups;
  double loss_scale;   /* the gradients were multiplied by this; 1: not scaled */
  double max_norm;     /* clips by the global norm over all groups; 0: no clipping */
  int32_t looks_first; /* 0: the gradients are known to be finite; without clipping they are then read only once */
  const sluice_adam_kernels_t* kernels;
  const sluice_threads_t* threads;
} sluice_adam_step_t;
