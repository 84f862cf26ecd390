// SPDX-License-Identifier: Apache-2.0
/* The memory of a device that the host cannot access: opening calls, copies, blocks. Work is enqueued on `stream`, the
 * host's or a lane's, and is stream-complete. Errors: INVALID_ARGUMENT and STATE if stated below, NO_MEMORY,
 * EXTERNAL. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "sluice/context.h"

struct sluice_device_s; /* device.h */

typedef struct sluice_device_memory_s {
  /* Called first: INVALID_ARGUMENT unless the stream belongs to this device. The stream then waits for the end of the
   * previous pass, on whichever stream that ran, since passes share the context's slots. *out_captured: the stream is
   * being captured into a graph. Then nothing waits for work enqueued before the capture, nothing is allocated and no
   * block is returned until the next open, and the caller must have made the same call outside of a capture before. */
  sluice_status_t (*open)(struct sluice_device_s* device, sluice_stream_t stream, int32_t* out_captured);
  /* INVALID_ARGUMENT, with the tensor, unless `data` is memory of this device. bytes 0: always valid. */
  sluice_status_t (*check_memory)(struct sluice_device_s* device, const void* data, uint64_t bytes, uint64_t alignment,
                                  const char* name);
  /* allocate, release NULL: the device's own memory. */
  void (*init_memory)(struct sluice_device_s* device, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                      void* user, sluice_allocator_t* out_memory);
  sluice_status_t (*fill)(struct sluice_device_s* device, sluice_stream_t stream, void* to, int32_t value,
                          uint64_t bytes);
  sluice_status_t (*copy)(struct sluice_device_s* device, sluice_stream_t stream, void* to, const void* from,
                          uint64_t bytes);
  /* Copies to host memory and waits for that copy: the only host wait. STATE if the stream is being captured. */
  sluice_status_t (*read)(struct sluice_device_s* device, sluice_stream_t stream, const void* data, void* out,
                          uint64_t bytes);
  /* Blocks from pools, for use from `stream` and from lanes of passes on it: page-locked host memory, or device memory
   * (memory: from init_memory; always the same one). most_bytes: maximum size of the block (0: any size that is not
   * wasteful), so that the memory of a plan's steps is bounded, and known to the byte if it equals `bytes`. In a
   * capture: an idle block, else STATE. give: makes a block free for others when the last pass of this device has
   * ended, without waiting for that, and never if called in a capture; accepts NULL. release: frees all blocks, and
   * waits. */
  sluice_status_t (*take)(struct sluice_device_s* device, sluice_stream_t stream, sluice_allocator_t* memory,
                          int32_t pinned, uint64_t bytes, uint64_t most_bytes, void** out_data);
  void (*give)(struct sluice_device_s* device, int32_t pinned, void* data);
  /* Bytes of device memory in idle blocks, which are freed if memory is short. */
  uint64_t (*idle_bytes)(const struct sluice_device_s* device);
  /* Limits page-locked blocks to this many bytes from now on; 0: no limit. */
  void (*limit_pinned)(struct sluice_device_s* device, uint64_t bytes);
  /* The name of the device, for users and for caches of measurements. */
  void (*describe)(const struct sluice_device_s* device, char* out_name, int32_t bytes);
  void (*release)(struct sluice_device_s* device);
  /* Within a job. fork_stream: *out_stream is another stream, which waits for the work that the job's `stream` has so
   * far. join_stream: `stream` waits for that stream. One at a time; a failed job may leave it to the join of the pass.
   */
  sluice_status_t (*fork_stream)(struct sluice_device_s* device, sluice_stream_t stream, sluice_stream_t* out_stream);
  sluice_status_t (*join_stream)(struct sluice_device_s* device, sluice_stream_t stream);
  /* Further tables. */
  const struct sluice_routing_kernels_s* routing;  /* routing_kernels.h */
  const struct sluice_device_clock_s* clock;       /* device_clock.h */
  const struct sluice_device_adam_kernels_s* adam; /* adam_kernels.h */
} sluice_device_memory_t;
