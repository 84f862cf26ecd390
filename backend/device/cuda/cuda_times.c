// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/cuda_times.h"

void sluice_cuda_times_release(sluice_device_t* device, sluice_cuda_times_t* times) {
  for (int32_t i = 0; i < times->num_marks; ++i) {
    if (times->marks[i] != NULL) (void)sluice_cuda_device_driver(device)->cuEventDestroy_v2(times->marks[i]);
  }
  sluice_free(device->allocator, times->marks, (uint64_t)times->num_marks * sizeof *times->marks);
  times->marks = NULL;
  times->num_marks = times->num_jobs = 0;
}

static int reserve(sluice_device_t* device, sluice_cuda_times_t* times, int32_t num_marks) {
  if (num_marks > times->num_marks) {
    sluice_cuda_times_release(device, times);
    times->marks = sluice_alloc_zeroed(device->allocator, (uint64_t)num_marks * sizeof *times->marks, "times of ops");
    if (times->marks == NULL) return 0;
    times->num_marks = num_marks;
  }
  for (int32_t i = 0; i < num_marks; ++i) {
    if (times->marks[i] != NULL) continue;
    if (sluice_cuda_device_driver(device)->cuEventCreate(&times->marks[i], SLUICE_CU_EVENT_DEFAULT) != 0) {
      times->marks[i] = NULL;
      return 0;
    }
  }
  return 1;
}

void sluice_cuda_times_begin(sluice_device_t* device, sluice_cuda_times_t* times, int32_t num_jobs,
                             sluice_stream_t stream) {
  times->num_jobs = 0;
  if (!times->wanted || !reserve(device, times, 2 * num_jobs + 1)) return;
  if (sluice_cuda_device_driver(device)->cuEventRecord(times->marks[0], stream) == 0) times->num_jobs = num_jobs;
}

void sluice_cuda_times_mark(sluice_device_t* device, sluice_cuda_times_t* times, int32_t job, int32_t is_end,
                            sluice_stream_t lane) {
  if (job >= times->num_jobs) return;
  if (sluice_cuda_device_driver(device)->cuEventRecord(times->marks[1 + 2 * job + is_end], lane) != 0) {
    times->num_jobs = 0;
  }
}

int sluice_cuda_times_read(sluice_device_t* device, const sluice_cuda_times_t* times, int32_t num_jobs,
                           uint64_t* begin_ns, uint64_t* end_ns) {
  if (times->num_jobs != num_jobs || num_jobs == 0) return 0;
  for (int32_t i = 0; i < 2 * num_jobs; ++i) {
    float milliseconds = 0;
    int code =
        sluice_cuda_device_driver(device)->cuEventElapsedTime(&milliseconds, times->marks[0], times->marks[1 + i]);
    if (code != 0) return 0;
    (i % 2 == 0 ? begin_ns : end_ns)[i / 2] = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 0;
  }
  return 1;
}
