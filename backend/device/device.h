// SPDX-License-Identifier: Apache-2.0
/* A device: lanes (ordered queues) and the events between them. kernels.h has its row kernels. For a device with its
 * own memory: device_memory.h, routing_kernels.h, device_clock.h.
 *
 * A pass submits its ops in program order, each to a lane, with the ops it waits for; then it joins. Nothing has to run
 * before the join. The device decides how lanes run: on a CPU the compute lane is the calling thread and every other
 * lane is one thread; on CUDA lanes are streams and events. Event i belongs to op i and fires when the op has ended.
 *
 * Failure: the first failing job determines the status of the pass. Afterwards only jobs marked `run_on_failure` run
 * (exchanges, so that ranks stay in step), until one of those fails too; skipped jobs still fire their events.
 *
 * Threads: begin, submit and join are called by one thread at a time (context-exclusive). */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/device/device_clock.h"
#include "backend/device/device_memory.h"
#include "backend/device/kernels.h"
#include "backend/device/routing_kernels.h"
#include "backend/device/drop_counters.h"
#include "sluice/context.h"

typedef struct sluice_device_s sluice_device_t;

/* Runs op `index` of the pass `user`; `stream` is the lane's (NULL on a CPU). */
typedef sluice_status_t (*sluice_job_fn_t)(void* user, int32_t index, sluice_stream_t stream);

typedef struct sluice_job_s {
  int32_t index;        /* the op, and its event */
  int32_t lane;         /* SLUICE_LANE_* */
  const int32_t* waits; /* events of jobs submitted earlier on other lanes; borrowed until join */
  int32_t num_waits;
  int32_t run_on_failure;
} sluice_job_t;

typedef struct sluice_device_vtable_s {
  void (*destroy)(sluice_device_t* device); /* the first member; joins and ends all threads */
  /* Starts a pass of `num_events` jobs. stream: the host's (NULL on a CPU). */
  sluice_status_t (*begin)(sluice_device_t* device, int32_t num_events, sluice_job_fn_t fn, void* user,
                           sluice_stream_t stream);
  sluice_status_t (*submit)(sluice_device_t* device, const sluice_job_t* job);
  /* Runs or awaits everything; returns the first failure with its error record on this thread. On a CPU all results are
   * host-complete. Must be called once after each successful begin. */
  sluice_status_t (*join)(sluice_device_t* device);
  /* Optional, both or none. events_bytes: the bytes that begin() allocates once for passes of num_events jobs (-1:
   * bytes allocated now). reserve: allocates them before the first pass. */
  uint64_t (*events_bytes)(const sluice_device_t* device, int32_t num_events);
  sluice_status_t (*reserve)(sluice_device_t* device, int32_t num_events);
} sluice_device_vtable_t;

/* Waits of one pass on a device whose lanes are threads. */
typedef struct sluice_lane_waits_s {
  uint64_t caller_ns;     /* waiting time of the calling thread */
  uint64_t caller_cpu_ns; /* CPU time that it spends going to sleep, being woken, and waking other threads */
  uint64_t cpu_ns;        /* the same for all threads; waking others is counted only for the calling thread */
  uint64_t num_wakes;
  uint64_t num_caller_wakes; /* those of the calling thread */
  uint64_t num_caller_posts; /* how often it woke other threads */
} sluice_lane_waits_t;

struct sluice_device_s {
  const sluice_device_vtable_t* vtable;
  const sluice_kernels_t* kernels;
  sluice_allocator_t* allocator; /* of host memory */
  const char* name;
  const sluice_device_memory_t* memory; /* NULL: the device works in host memory */
  int32_t counts_waits;                 /* set before begin: after join, `waits` has the waits of the pass */
  sluice_lane_waits_t waits;
};

/* out_device: new, release with device->vtable->destroy. Threads are created with the first job of another lane. */
sluice_status_t sluice_cpu_device_create(sluice_allocator_t* allocator, sluice_device_t** out_device);
