/* When the jobs of a pass ran on the device: an event before each and one behind it, on its lane, counted from one on
 * the host's stream at the pass's begin. An event that cannot be made or recorded costs the pass its times and nothing
 * else. The device is entered. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_CUDA_TIMES_H_
#define SLUICE_BACKEND_DEVICE_CUDA_CUDA_TIMES_H_

#include "backend/device/cuda/cuda_device.h"

typedef struct sluice_cuda_times_s {
  int32_t wanted;
  int32_t num_jobs;  /* of the running pass that have marks; 0: it has no times */
  int32_t num_marks; /* allocated */
  void** marks;      /* the origin, then begin and end of each job */
} sluice_cuda_times_t;

void sluice_cuda_times_begin(sluice_device_t* device, sluice_cuda_times_t* times, int32_t num_jobs,
                             sluice_stream_t stream);
void sluice_cuda_times_mark(sluice_device_t* device, sluice_cuda_times_t* times, int32_t job, int32_t is_end,
                            sluice_stream_t lane);
/* After the pass has ended. Returns 0 where it has no times. begin_ns, end_ns: [num_jobs]. */
int sluice_cuda_times_read(sluice_device_t* device, const sluice_cuda_times_t* times, int32_t num_jobs,
                           uint64_t* begin_ns, uint64_t* end_ns);
void sluice_cuda_times_release(sluice_device_t* device, sluice_cuda_times_t* times);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_CUDA_TIMES_H_ */
