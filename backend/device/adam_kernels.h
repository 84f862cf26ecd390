// SPDX-License-Identifier: Apache-2.0
/* Adam on a device whose memory the host cannot access: the rules of backend/optim/adam.h, with the same bits. Work is
 * enqueued on `stream` and is stream-complete. All pointers are device memory. */
#pragma once

#include <stdint.h>

#include "backend/base/status.h"
#include "backend/device/adam_flags.h"
#include "sluice/context.h"

struct sluice_device_s; /* device.h */

/* A copy of sluice_adam_numbers_t, which a device does not include. */
typedef struct sluice_device_adam_numbers_s {
  float grad_scale, l2, one_minus_beta1, one_minus_beta2, decay, epsilon_high, epsilon_low, step_high, step_low;
} sluice_device_adam_numbers_t;

typedef struct sluice_device_adam_s {
  int64_t count;
  const float* grad; /* before the scale */
  float *master, *exp_avg, *exp_avg_sq;
  void* param; /* out: the master in `dtype`, rounded to nearest even */
  int32_t dtype;
  sluice_device_adam_numbers_t numbers;
} sluice_device_adam_t;

/* Gradients of several ranks, each `stride` elements after the previous one. */
typedef struct sluice_device_parts_s {
  const void* data;
  int32_t dtype, num_parts;
  int64_t stride;
} sluice_device_parts_t;

typedef struct sluice_device_adam_kernels_s {
  /* Sets flags [SLUICE_ADAM_NUM_FLAGS] to 1 if an element is infinite or NaN, and if one is above `limit` or below
   * -limit; otherwise leaves them. */
  sluice_status_t (*look)(struct sluice_device_s* device, sluice_stream_t stream, const void* grad, int32_t dtype,
                          int64_t count, float limit, int32_t* flags);
  /* out[i]: the sum of the parts' element i, in f32 and in their order. */
  sluice_status_t (*sum)(struct sluice_device_s* device, sluice_stream_t stream, const sluice_device_parts_t* parts,
                         int64_t count, float* out);
  /* out[i] = grad[i] as f32. */
  sluice_status_t (*stage)(struct sluice_device_s* device, sluice_stream_t stream, const void* grad, int32_t dtype,
                           int64_t count, float* out);
  sluice_status_t (*update)(struct sluice_device_s* device, sluice_stream_t stream, const sluice_device_adam_t* adam);
} sluice_device_adam_kernels_t;
