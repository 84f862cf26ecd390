// SPDX-License-Identifier: Apache-2.0
/* Times of the jobs of a pass on the device: an event before and one after each job, on its lane, relative to one on
 * the host's stream at the begin of the pass. If an event cannot be created or recorded, the pass has no times; nothing
 * else fails. The device is entered. */
#pragma once

#include "backend/device/cuda/cuda_device.h"

typedef struct sluice_cuda_times_s {
  int32_t wanted;
  int32_t num_jobs;  /* jobs of the running pass with marks; 0: it has no times */
  int32_t num_marks; /* allocated */
  void** marks;      /* the origin, then begin and end of each job */
} sluice_cuda_times_t;

void sluice_cuda_times_begin(sluice_device_t* device, sluice_cuda_times_t* times, int32_t num_jobs,
                             sluice_stream_t stream);
void sluice_cuda_times_mark(sluice_device_t* device, sluice_cuda_times_t* times, int32_t job, int32_t is_end,
                            sluice_stream_t lane);
/* Call after the pass has ended. Returns 0 if it has no times. begin_ns, end_ns: [num_jobs]. */
int sluice_cuda_times_read(sluice_device_t* device, const sluice_cuda_times_t* times, int32_t num_jobs,
                           uint64_t* begin_ns, uint64_t* end_ns);
void sluice_cuda_times_release(sluice_device_t* device, sluice_cuda_times_t* times);
