// SPDX-License-Identifier: Apache-2.0
/* The sum of gradients over ranks in a device's memory, in rank order and in f32: the bits of sluice_comm_sum_f32. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/device/device.h"

/* Returns an upper bound on the bytes that the sum of `count` elements receives, aligned up to 64. A step allocates
 * them for its longest chunk, after its slots. */
uint64_t sluice_device_sum_receive_bytes(int64_t count, int32_t world_size);

typedef struct sluice_device_sum_s {
  const void* from; /* this rank's gradients, sent in `dtype`; may be `out` if that is f32 */
  int32_t dtype;
  int64_t count;
  float* out;    /* [count] */
  void* receive; /* sluice_device_sum_receive_bytes() */
} sluice_device_sum_t;

/* Each rank sums its slice, and all ranks get all slices. Stream-complete. comm: at least two ranks, with exchanges of
 * device memory. Errors: NO_MEMORY, and errors of exchanges and kernels. After any error the ranks are out of step: the
 * caller ends comm. */
sluice_status_t sluice_device_sum(sluice_device_t* device, sluice_comm_t* comm, sluice_stream_t stream,
                                  const sluice_device_sum_t* sum);
