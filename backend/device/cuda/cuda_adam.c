// SPDX-License-Identifier: Apache-2.0
/* The kernels of adam_kernels.h on a CUDA device. */
#include "backend/base/math.h"
#include "backend/device/cuda/cuda_launch.h"
#include "backend/device/cuda/cuda_state.h"

/* Kernels of one name are numbered in the order f32, bf16, f16, like SLUICE_DTYPE_*. */
static int32_t by_dtype(int32_t kernel, int32_t dtype) { return kernel + (dtype - SLUICE_DTYPE_F32); }

static sluice_status_t launch(sluice_device_t* device, sluice_stream_t stream, int32_t kernel, int32_t dtype,
                              sluice_adam_args_t* args) {
  args->units = sluice_ceil_div(args->count, SLUICE_CUDA_ADAM_TILE);
  SLUICE_TRY(sluice_cuda_enter(device));
  sluice_cuda_launch(by_dtype(kernel, dtype), stream, args, args->units);
  return sluice_cuda_leave(device);
}

static sluice_status_t look(sluice_device_t* device, sluice_stream_t stream, const void* grad, int32_t dtype,
                            int64_t count, float limit, int32_t* flags) {
  sluice_adam_args_t args = {.count = count, .grad = grad, .flags = flags, .limit = limit};
  return launch(device, stream, SLUICE_CUDA_adam_look_f32, dtype, &args);
}

static sluice_status_t stage(sluice_device_t* device, sluice_stream_t stream, const void* grad, int32_t dtype,
                             int64_t count, float* out) {
  sluice_adam_args_t args = {.count = count, .grad = grad, .staged = out};
  return launch(device, stream, SLUICE_CUDA_adam_stage_f32, dtype, &args);
}

static sluice_status_t sum(sluice_device_t* device, sluice_stream_t stream, const sluice_device_parts_t* parts,
                           int64_t count, float* out) {
  sluice_adam_args_t args = {
      .count = count, .grad = parts->data, .num_parts = parts->num_parts, .stride = parts->stride, .staged = out};
  return launch(device, stream, SLUICE_CUDA_adam_sum_f32, parts->dtype, &args);
}

static sluice_status_t update(sluice_device_t* device, sluice_stream_t stream, const sluice_device_adam_t* adam) {
  const sluice_device_adam_numbers_t* n = &adam->numbers;
  sluice_adam_args_t args = {
      .count = adam->count,
      .staged = (float*)(uintptr_t)adam->grad,
      .master = adam->master,
      .exp_avg = adam->exp_avg,
      .exp_avg_sq = adam->exp_avg_sq,
      .param = adam->param,
      .grad_scale = n->grad_scale,
      .l2 = n->l2,
      .one_minus_beta1 = n->one_minus_beta1,
      .one_minus_beta2 = n->one_minus_beta2,
      .decay = n->decay,
      .epsilon_high = n->epsilon_high,
      .epsilon_low = n->epsilon_low,
      .step_high = n->step_high,
      .step_low = n->step_low,
  };
  return launch(device, stream, SLUICE_CUDA_adam_update_f32, adam->dtype, &args);
}

const sluice_device_adam_kernels_t sluice_cuda_adam_kernels = {
    .look = look, .stage = stage, .sum = sum, .update = update};
