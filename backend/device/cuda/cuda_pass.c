// SPDX-License-Identifier: Apache-2.0
/* Lanes, jobs and joins of a pass, and the state that a pass leaves on lanes. */
#include <string.h>

#include "backend/device/cuda/cuda_state.h"

sluice_status_t sluice_cuda_make_event(cuda_device_t* device, void** event) {
  if (*event != NULL) return SLUICE_OK;
  CU_TRY(device, cuEventCreate(event, SLUICE_CU_EVENT_DISABLE_TIMING), "no event on device %d", device->ordinal);
  return SLUICE_OK;
}

static sluice_status_t reserve(cuda_device_t* device, int32_t num_events) {
  SLUICE_TRY(sluice_cuda_make_event(device, &device->entry));
  if (num_events > device->num_events) {
    void** events = sluice_alloc_zeroed(device->base.allocator, (uint64_t)num_events * sizeof *events, "cuda events");
    if (events == NULL) return sluice_alloc_status();
    if (device->num_events > 0) memcpy(events, device->events, (size_t)device->num_events * sizeof *events);
    sluice_free(device->base.allocator, device->events, (uint64_t)device->num_events * sizeof *events);
    device->events = events;
    device->num_events = num_events;
  }
  for (int32_t i = 0; i < num_events; ++i) SLUICE_TRY(sluice_cuda_make_event(device, &device->events[i]));
  return SLUICE_OK;
}

static sluice_status_t begin_inside(cuda_device_t* device, int32_t num_events, sluice_stream_t stream) {
  SLUICE_TRY(sluice_cuda_check_stream(&device->base, stream));
  SLUICE_TRY(reserve(device, num_events));
  SLUICE_TRY(sluice_cuda_make_event(device, &device->memory.end));
  CU_TRY(device, cuEventRecord(device->entry, stream), "the entry of a pass cannot be recorded on the host's stream %p",
         stream);
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_begin(sluice_device_t* base, int32_t num_events, sluice_job_fn_t fn, void* user,
                                  sluice_stream_t stream) {
  cuda_device_t* device = sluice_cuda_cast(base);
  SLUICE_TRY(sluice_cuda_enter(base));
  sluice_status_t status = begin_inside(device, num_events, stream);
  if (status != SLUICE_OK) return sluice_cuda_leave_with(base, status);
  sluice_cuda_times_begin(base, &device->memory.times, device->memory.captured ? 0 : num_events, stream);
  SLUICE_TRY(sluice_cuda_leave(base));
  memset(device->used, 0, sizeof device->used);
  device->lanes[SLUICE_LANE_COMPUTE] = stream;
  device->fn = fn;
  device->user = user;
  device->failed = device->dead = 0;
  return SLUICE_OK;
}

/* Creates the stream of a lane on first use; in each pass the lane starts after the work on the host's stream at
 * begin. */
static sluice_status_t use_lane(cuda_device_t* device, int32_t lane) {
  if (lane == SLUICE_LANE_COMPUTE || device->used[lane]) return SLUICE_OK;
  if (device->lanes[lane] == NULL) {
    int least = 0, greatest = 0;
    CU_TRY(device, cuCtxGetStreamPriorityRange(&least, &greatest), "no range of stream priorities");
    /* Exchanges have priority: a rank that sends late delays all others. */
    int priority = lane == SLUICE_LANE_COMM ? greatest : least;
    CU_TRY(device, cuStreamCreateWithPriority(&device->lanes[lane], SLUICE_CU_STREAM_NON_BLOCKING, priority),
           "no stream for lane %d on device %d", lane, device->ordinal);
  }
  SLUICE_TRY(sluice_cuda_make_event(device, &device->exits[lane]));
  CU_TRY(device, cuStreamWaitEvent(device->lanes[lane], device->entry, 0), "lane %d cannot wait for the host's stream",
         lane);
  device->used[lane] = 1;
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_fork_stream(sluice_device_t* base, sluice_stream_t stream, sluice_stream_t* out_stream) {
  cuda_device_t* device = sluice_cuda_cast(base);
  SLUICE_TRY(use_lane(device, SLUICE_CUDA_LANE_OWN));
  SLUICE_TRY(sluice_cuda_make_event(device, &device->forked));
  SLUICE_TRY(sluice_cuda_make_event(device, &device->rejoined));
  *out_stream = device->lanes[SLUICE_CUDA_LANE_OWN];
  CU_TRY(device, cuEventRecord(device->forked, stream), "the work of a lane cannot be recorded");
  CU_TRY(device, cuStreamWaitEvent(*out_stream, device->forked, 0), "a stream cannot wait for the lane next to it");
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_join_stream(sluice_device_t* base, sluice_stream_t stream) {
  cuda_device_t* device = sluice_cuda_cast(base);
  CU_TRY(device, cuEventRecord(device->rejoined, device->lanes[SLUICE_CUDA_LANE_OWN]),
         "the work next to a lane cannot be recorded");
  CU_TRY(device, cuStreamWaitEvent(stream, device->rejoined, 0), "a lane cannot wait for the stream next to it");
  return SLUICE_OK;
}

/* Keeps the first failure with its record. */
static void fail(cuda_device_t* device, int32_t is_final) {
  if (!device->failed) sluice_error_capture(&device->error);
  device->failed = 1;
  if (is_final) device->dead = 1;
}

static sluice_status_t wait_for_jobs(cuda_device_t* device, const sluice_job_t* job) {
  for (int32_t i = 0; i < job->num_waits; ++i) {
    CU_TRY(device, cuStreamWaitEvent(device->lanes[job->lane], device->events[job->waits[i]], 0),
           "job %d cannot wait for job %d", job->index, job->waits[i]);
  }
  return SLUICE_OK;
}

static sluice_status_t submit_inside(cuda_device_t* device, const sluice_job_t* job) {
  SLUICE_TRY(use_lane(device, job->lane));
  SLUICE_TRY(wait_for_jobs(device, job));
  if (!device->dead && (!device->failed || job->run_on_failure)) {
    sluice_cuda_times_mark(&device->base, &device->memory.times, job->index, 0, device->lanes[job->lane]);
    sluice_status_t status = device->fn(device->user, job->index, device->lanes[job->lane]);
    sluice_cuda_times_mark(&device->base, &device->memory.times, job->index, 1, device->lanes[job->lane]);
    if (status == SLUICE_OK && device->launch_status != SLUICE_OK) {
      (void)sluice_error_adopt(&device->launch_error);
      status = device->launch_status;
    }
    device->launch_status = SLUICE_OK;
    if (status != SLUICE_OK) fail(device, job->run_on_failure);
  }
  CU_TRY(device, cuEventRecord(device->events[job->index], device->lanes[job->lane]),
         "the end of job %d cannot be recorded", job->index);
  return SLUICE_OK;
}

/* A failed job does not make submit fail; a driver that refuses events makes it fail, and ends the pass. */
sluice_status_t sluice_cuda_submit(sluice_device_t* base, const sluice_job_t* job) {
  cuda_device_t* device = sluice_cuda_cast(base);
  sluice_status_t status = sluice_cuda_enter(base);
  if (status == SLUICE_OK) {
    status = submit_inside(device, job);
    if (status != SLUICE_OK) fail(device, 1);
    sluice_status_t left = sluice_cuda_leave(base);
    if (status == SLUICE_OK) status = left;
  }
  if (status != SLUICE_OK) fail(device, 1);
  return status;
}

/* Joins every used lane, even if another one fails. */
static void join_lane(cuda_device_t* device, int32_t lane) {
  int code = device->driver->cuEventRecord(device->exits[lane], device->lanes[lane]);
  if (code == 0) code = device->driver->cuStreamWaitEvent(device->lanes[SLUICE_LANE_COMPUTE], device->exits[lane], 0);
  if (code != 0) {
    (void)sluice_cuda_fail(device->driver, code, "lane %d cannot be joined to the host's stream", lane);
    fail(device, 1);
    device->unjoined[lane] = 1;
  }
}

/* The next user of the same memory waits for this event, on any stream. In a capture nothing ends: the event keeps the
 * previous pass. */
static void record_end(cuda_device_t* device) {
  if (device->memory.captured) return;
  int code = device->driver->cuEventRecord(device->memory.end, device->lanes[SLUICE_LANE_COMPUTE]);
  device->unended = code != 0;
  if (code == 0) {
    device->memory.has_end = 1;
    return;
  }
  (void)sluice_cuda_fail(device->driver, code, "the end of a pass cannot be recorded");
  fail(device, 1);
}

sluice_status_t sluice_cuda_join(sluice_device_t* base) {
  cuda_device_t* device = sluice_cuda_cast(base);
  sluice_status_t status = sluice_cuda_enter(base);
  if (status == SLUICE_OK) {
    for (int32_t lane = 0; lane < SLUICE_CUDA_NUM_LANES; ++lane) {
      if (device->used[lane]) join_lane(device, lane);
    }
    record_end(device);
    status = sluice_cuda_leave(base);
  } else {
    memcpy(device->unjoined, device->used, sizeof device->unjoined);
    device->unended = 1;
  }
  if (status != SLUICE_OK) fail(device, 1);
  return device->failed ? sluice_error_adopt(&device->error) : SLUICE_OK;
}

/* Memory that a lane may still use must not be given to the next pass. */
sluice_status_t sluice_cuda_rejoin(sluice_device_t* base, sluice_stream_t stream) {
  cuda_device_t* device = sluice_cuda_cast(base);
  for (int32_t lane = 0; lane < SLUICE_CUDA_NUM_LANES; ++lane) {
    if (!device->unjoined[lane]) continue;
    CU_TRY(device, cuEventRecord(device->exits[lane], device->lanes[lane]), "lane %d of a failed pass cannot be joined",
           lane);
    CU_TRY(device, cuStreamWaitEvent(stream, device->exits[lane], 0), "lane %d of a failed pass cannot be joined",
           lane);
    device->unjoined[lane] = 0;
  }
  if (device->unended) {
    CU_TRY(device, cuEventRecord(device->memory.end, device->lanes[SLUICE_LANE_COMPUTE]),
           "the end of a failed pass cannot be recorded");
    device->unended = 0;
    device->memory.has_end = 1;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_check_joined(sluice_device_t* base) {
  const cuda_device_t* device = sluice_cuda_cast(base);
  int32_t open = device->unended;
  for (int32_t lane = 0; lane < SLUICE_CUDA_NUM_LANES; ++lane) open |= device->unjoined[lane];
  if (!open) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "cuda: an earlier pass failed and its lanes may still run: make one call outside the capture "
                     "before it");
}
