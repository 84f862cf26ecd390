// SPDX-License-Identifier: Apache-2.0
/* Launches kernels on the device that this thread has entered. */
#pragma once

#include "backend/device/cuda/cuda_device.h"
#include "backend/device/cuda/cuda_kernel_ids.h"
#include "backend/device/cuda/kernels/kernel_args.h"

/* Launches `kernel` with `units` units and its argument struct `args`, on the device that this thread has entered. A
 * failure is kept for sluice_cuda_leave. */
void sluice_cuda_launch(int32_t kernel, sluice_stream_t stream, const void* args, int64_t units);

/* Returns the first failed launch since enter, with its record on this thread; leave reports it too. */
sluice_status_t sluice_cuda_launch_status(void);
