// SPDX-License-Identifier: Apache-2.0
/* A model of two tensors in two groups, with its optimizer. Parameters and gradients are on a fake device or in
 * host memory. Memory of a fake device is host memory, so tests fill and compare it in place. */
#pragma once

#include <stdint.h>

#include "sluice/optimizer.h"

enum { COM_COUNT_A = 1500, COM_COUNT_B = 4100, COM_ELEMENTS = COM_COUNT_A + COM_COUNT_B, COM_BUCKET = 1024 };

typedef struct com_model_s {
  void *param, *grad;
  int32_t param_dtype, grad_dtype;
  float master[COM_ELEMENTS], exp_avg[COM_ELEMENTS], exp_avg_sq[COM_ELEMENTS];
  sluice_optimizer_tensor_t tensors[2];
  sluice_optimizer_group_t groups[2];
  const sluice_optimizer_group_t* group_list[2];
  sluice_optimizer_step_args_t args;
  sluice_optimizer_step_result_t result;
  sluice_optimizer_t* optimizer;
  sluice_context_t* context; /* NULL: parameters are in host memory */
  int32_t rank;
} com_model_t;

/* A model without an optimizer. context: this rank's fake device (capi/test/cuda/fakes.h); NULL: host memory. */
com_model_t* com_model_fill(sluice_context_t* context, int32_t rank, int32_t param_dtype, int32_t grad_dtype);
/* With buckets of COM_BUCKET. */
sluice_optimizer_config_t com_config_of(sluice_context_t* context);
void com_model_free(com_model_t* m);

/* Gradients of a step on a rank, which are values of bf16. */
void com_set_gradients(com_model_t* m, int64_t step);
void com_set_gradient(com_model_t* m, int64_t element, float value);
float com_get_gradient(const com_model_t* m, int64_t element);

/* Runs a step and waits until the device has finished; m->result is its result. */
sluice_status_t com_step(com_model_t* m);
/* Advances the step numbers. */
void com_advance(com_model_t* m);

/* Copies parameters and states. */
void com_copy(com_model_t* to, const com_model_t* from);
/* Returns NULL, or the difference of parameters and states. */
const char* com_difference(const com_model_t* a, const com_model_t* b);
