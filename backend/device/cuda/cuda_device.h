// SPDX-License-Identifier: Apache-2.0
/* The CUDA device: lanes are streams; a job enqueues work and returns.
 *
 * The compute lane is the stream that the host passes to begin(); the other three are Sluice's own, created on first
 * use, the communication lane with the highest priority. A job's event is recorded on its lane when the job has
 * enqueued everything; waits are cuStreamWaitEvent; the first use of a lane in a pass waits for the work on the host's
 * stream at begin(), and join() makes the host's stream wait for every lane. So submit, begin and join never wait on
 * the host, and a pass may be captured into a CUDA graph. The only host wait is sluice_cuda_read().
 *
 * A failure is a failure to enqueue: errors that the device reports later (a fault in a kernel) are returned by a later
 * call as EXTERNAL. Jobs after a failed one are skipped as on a CPU; their events are still recorded.
 *
 * Threads: as device.h. After fork the child's device is inert: calls return STATE, destroy frees host memory only. */
#pragma once

#include "backend/device/cuda/cuda_driver.h"
#include "backend/device/cuda/cuda_numa.h"
#include "backend/device/device.h"

/* Counted over the lifetime of a device. */
typedef struct sluice_cuda_stats_s {
  uint64_t num_host_waits; /* sluice_cuda_read: 1 per forward in exact mode, 0 in graph mode */
  uint64_t num_launches;
} sluice_cuda_stats_t;

/* The compiled kernels, all architectures in one image; empty (bytes 0) in a build without nvcc. */
typedef struct sluice_cuda_image_s {
  const void* data;
  uint64_t bytes;
} sluice_cuda_image_t;
sluice_cuda_image_t sluice_cuda_image(void);

/* Creates device number `ordinal` through the driver of this machine, in its primary context (the one that PyTorch
 * uses). out_device: new, release with device->vtable->destroy, which does not wait for enqueued work. Errors:
 * NOT_FOUND (no driver, too old, no such device, kernels missing), NO_MEMORY, EXTERNAL. */
sluice_status_t sluice_cuda_device_create(int32_t ordinal, sluice_allocator_t* allocator, sluice_device_t** out_device);
/* The same with a table, borrowed until destroy, and an image. */
sluice_status_t sluice_cuda_device_create_from(const sluice_cuda_driver_t* driver, sluice_cuda_image_t image,
                                               int32_t ordinal, sluice_allocator_t* allocator,
                                               sluice_device_t** out_device);

const sluice_cuda_driver_t* sluice_cuda_device_driver(const sluice_device_t* device);
int32_t sluice_cuda_device_ordinal(const sluice_device_t* device);
/* Returns its number of SMs; 132, as on an H200, if the driver does not report it. */
int32_t sluice_cuda_device_sms(const sluice_device_t* device);
/* Returns the NUMA node for its host memory, as reported by the system and the driver. */
sluice_cuda_numa_t sluice_cuda_device_numa(const sluice_device_t* device);
/* Writes its name ("NVIDIA H200"); "unknown GPU" if the driver reports none. */
void sluice_cuda_device_name(const sluice_device_t* device, char* out_name, int32_t bytes);
sluice_cuda_stats_t sluice_cuda_device_stats(const sluice_device_t* device);

/* Returns whether this process is a fork of the one that created the device: then it must not call the driver. */
int sluice_cuda_is_inherited(const sluice_device_t* device);

/* Makes the device's context current on this thread, and its kernels those that device->kernels launches. Jobs run
 * inside; other callers call these around kernels and external libraries. May be nested. leave returns the first failed
 * launch since enter, with its record, because the entries of kernels.h return nothing. Errors: STATE (after fork),
 * EXTERNAL; after a failed enter do not call leave. */
sluice_status_t sluice_cuda_enter(sluice_device_t* device);
sluice_status_t sluice_cuda_leave(sluice_device_t* device);
/* Leaves, and returns the first error of `status` and the launches. */
sluice_status_t sluice_cuda_leave_with(sluice_device_t* device, sluice_status_t status);

/* Writes `count` 64-bit words to device memory through launch parameters: no buffer to keep alive, no wait. For small
 * tables, between enter and leave. Returns the first failure since enter: then the words are not written.
 */
sluice_status_t sluice_cuda_write_words(sluice_stream_t stream, void* to, const uint64_t* words, int64_t count);

/* A packed weight W [rows, cols], and its decoded output: contiguous rows, aligned to 16 bytes. */
typedef struct sluice_cuda_packed_s {
  const void* codes;
  const void* scales;
  void* out;
  int64_t rows;
  int64_t row_bytes; /* of codes: distance of two rows */
  int64_t scales_ld; /* distance of two rows of scales, in scales */
  int64_t half;      /* rows after which blocks of rows start again; 0: they do not */
} sluice_cuda_packed_t;

/* Decodes weights of one format (SLUICE_WEIGHTS_*), width and block size, as defined in backend/gemm/packed.h, with one
 * launch per SLUICE_CUDA_DECODED weights. The sum of their rows, and cols, are below 2^31. Call between enter and
 * leave. Returns the first failure since enter; UNSUPPORTED if cols * block_cols is 2^41 or more. */
sluice_status_t sluice_cuda_decode(sluice_stream_t stream, int32_t format, int64_t block_cols, int64_t cols,
                                   int32_t dtype, const sluice_cuda_packed_t* weights, int64_t count);

/* Copies `bytes` from the device to `out` (pinned memory, or the copy is slower) and waits for that copy only: the one
 * place where the host waits. Errors: STATE (the stream is being captured, or after fork), EXTERNAL. */
sluice_status_t sluice_cuda_read(sluice_device_t* device, sluice_stream_t stream, const void* data, void* out,
                                 uint64_t bytes);

/* Returns INVALID_ARGUMENT with the tensor and the reason, unless `data` is memory of this device with that alignment.
 * bytes = 0: always valid. */
sluice_status_t sluice_cuda_check_memory(sluice_device_t* device, const void* data, uint64_t bytes, uint64_t alignment,
                                         const char* name);
/* Returns INVALID_ARGUMENT unless the stream (NULL: the default one) belongs to the device's context. */
sluice_status_t sluice_cuda_check_stream(sluice_device_t* device, sluice_stream_t stream);
