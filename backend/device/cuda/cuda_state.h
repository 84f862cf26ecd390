// SPDX-License-Identifier: Apache-2.0
/* The state of a CUDA device, and the functions that its files share. Private to this folder; cuda_device.h is the
 * public header. */
#pragma once

#include <sys/types.h>

#include "backend/base/lanes.h"
#include "backend/device/adam_kernels.h"
#include "backend/device/cuda/cuda_device.h"
#include "backend/device/cuda/cuda_kernel_ids.h"
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/cuda_times.h"

/* The streams of a device: its lanes, and one for own rows, which runs next to the communication lane. */
enum { SLUICE_CUDA_LANE_OWN = SLUICE_NUM_LANES, SLUICE_CUDA_NUM_LANES };

/* State that a device keeps for the engine. */
typedef struct sluice_cuda_memory_state_s {
  void* end;        /* event: the end of the last pass, on its host's stream */
  int32_t has_end;  /* it was recorded */
  int32_t captured; /* the stream of the last open is being captured into a graph */
  void* pinned;     /* target of reads */
  uint64_t pinned_bytes;
  uint64_t pinned_limit;          /* of the pool below; 0: none */
  sluice_cuda_times_t times;      /* of the running pass's ops */
  sluice_pinned_pool_t* pools[2]; /* for saved rows: [0] on the device, [1] pinned; NULL before the first use */
} sluice_cuda_memory_state_t;

typedef struct cuda_device_s {
  sluice_device_t base;
  sluice_cuda_driver_t own_driver; /* used if the device loaded the driver itself */
  const sluice_cuda_driver_t* driver;
  int32_t ordinal;
  int device; /* the driver's handle */
  void* context;
  void* library;
  void* kernels[SLUICE_CUDA_NUM_KERNELS]; /* set by the first launch that succeeds */
  pid_t pid;
  /* Streams and events, kept between passes. */
  void* lanes[SLUICE_CUDA_NUM_LANES]; /* [compute] is the host's stream of the current pass */
  void* entry;                        /* work on the host's stream at begin */
  void* exits[SLUICE_CUDA_NUM_LANES];
  void* forked;   /* work on the communication lane when the stream next to it begins */
  void* rejoined; /* work on that stream when the communication lane waits for it */
  void* read_done;
  void** events; /* [num_events] event of op i */
  int32_t num_events;
  /* The current pass. */
  int32_t used[SLUICE_CUDA_NUM_LANES];
  /* Lanes that a failed join left running, for the next pass to wait for. */
  int32_t unjoined[SLUICE_CUDA_NUM_LANES];
  int32_t unended; /* the end of the pass on lanes[compute] was not recorded */
  sluice_job_fn_t fn;
  void* user;
  int32_t failed; /* only run_on_failure jobs run */
  int32_t dead;   /* nothing runs */
  sluice_error_info_t error;
  /* Launches since enter. */
  int32_t depth;
  sluice_status_t launch_status;
  sluice_error_info_t launch_error;
  struct cuda_device_s* outer; /* the device that this thread had entered before */
  sluice_cuda_stats_t stats;
  sluice_cuda_memory_state_t memory;
} cuda_device_t;

static inline cuda_device_t* sluice_cuda_cast(sluice_device_t* device) { return (cuda_device_t*)device; }
static inline sluice_cuda_memory_state_t* sluice_cuda_memory_state(sluice_device_t* device) {
  return &sluice_cuda_cast(device)->memory;
}

/* Calls the driver; on failure records and returns. */
#define CU_TRY(device, call, ...)                                                        \
  do {                                                                                   \
    int cu_code_ = (device)->driver->call;                                               \
    if (cu_code_ != 0) return sluice_cuda_fail((device)->driver, cu_code_, __VA_ARGS__); \
  } while (0)

/* ---- cuda_pass.c: lanes, jobs and joins of a pass. The device is entered ---- */

/* Creates an event on first use. */
sluice_status_t sluice_cuda_make_event(cuda_device_t* device, void** event);
/* Makes `stream` wait for lanes that a failed join left running. */
sluice_status_t sluice_cuda_rejoin(sluice_device_t* device, sluice_stream_t stream);
/* Returns STATE if there are such lanes: a capture cannot wait for them. */
sluice_status_t sluice_cuda_check_joined(sluice_device_t* device);

/* The entries of the device's table. */
sluice_status_t sluice_cuda_begin(sluice_device_t* device, int32_t num_events, sluice_job_fn_t fn, void* user,
                                  sluice_stream_t stream);
sluice_status_t sluice_cuda_submit(sluice_device_t* device, const sluice_job_t* job);
sluice_status_t sluice_cuda_join(sluice_device_t* device);
/* Entries of the table of its memory. */
sluice_status_t sluice_cuda_fork_stream(sluice_device_t* device, sluice_stream_t stream, sluice_stream_t* out_stream);
sluice_status_t sluice_cuda_join_stream(sluice_device_t* device, sluice_stream_t stream);

/* ---- the device's tables ---- */

/* The table of row kernels (kernels.h) whose entries launch CUDA kernels. */
const sluice_kernels_t* sluice_cuda_kernels(void);
/* The tables of a device with its own memory (device_memory.h, routing_kernels.h, adam_kernels.h, device_clock.h). */
extern const sluice_device_memory_t sluice_cuda_memory;
extern const sluice_routing_kernels_t sluice_cuda_routing_kernels;
extern const sluice_device_adam_kernels_t sluice_cuda_adam_kernels;
extern const sluice_device_clock_t sluice_cuda_clock;

/* Releases the cached blocks. The device is entered if possible; called by destroy. */
void sluice_cuda_memory_release(sluice_device_t* device);
