// SPDX-License-Identifier: Apache-2.0
#include "backend/device/sim/sim_device.h"

#include <string.h>

#define NOT_YET (-1.0)

typedef struct sim_lane_s {
  int32_t first, last; /* of its jobs, linked by next_of; -1 none */
  int32_t running;     /* index of the running job; -1: idle */
  double left;         /* seconds of the running job at full speed */
} sim_lane_t;

typedef struct sim_device_s {
  sluice_device_t base;
  sluice_sim_model_t model;
  int32_t num_events, capacity;
  sluice_job_t* jobs;
  int32_t* next_of;
  double *begin, *end;
  char* block;
  uint64_t block_bytes;
  sim_lane_t lanes[SLUICE_NUM_LANES];
  sluice_overlap_t overlap; /* of the job that the communication lane runs */
  /* While the job of that lane runs; NULL: those of the model. Of lanes that do not copy: always NULL. */
  const double (*share[SLUICE_NUM_LANES])[1 << SLUICE_NUM_LANES];
  double tokens;                 /* line time in the bucket when that job ends, or when the last one ended */
  double comm_needs, comm_ended; /* undisturbed time of that job, and the time when the last one ended */
  double busy[SLUICE_NUM_LANES];
  double now;
} sim_device_t;

static sim_device_t* downcast(sluice_device_t* device) { return (sim_device_t*)device; }

static void sim_destroy(sluice_device_t* base) {
  sim_device_t* device = downcast(base);
  sluice_free(base->allocator, device->block, device->block_bytes);
  sluice_free(base->allocator, device, sizeof *device);
}

static sluice_status_t reserve_jobs(sim_device_t* device, int32_t num_events) {
  if (num_events <= device->capacity) return SLUICE_OK;
  uint64_t count = (uint64_t)num_events;
  uint64_t bytes = count * (sizeof(sluice_job_t) + 2 * sizeof(double) + sizeof(int32_t));
  char* block = sluice_alloc(device->base.allocator, bytes, "jobs of a simulated pass");
  if (block == NULL) return sluice_alloc_status();
  sluice_free(device->base.allocator, device->block, device->block_bytes);
  device->block = block;
  device->block_bytes = bytes;
  device->capacity = num_events;
  device->jobs = (sluice_job_t*)(void*)block;
  device->begin = (double*)(void*)(block + count * sizeof(sluice_job_t));
  device->end = device->begin + count;
  device->next_of = (int32_t*)(void*)(device->end + count);
  return SLUICE_OK;
}

static sluice_status_t sim_begin(sluice_device_t* base, int32_t num_events, sluice_job_fn_t fn, void* user,
                                 sluice_stream_t stream) {
  (void)fn, (void)user, (void)stream;
  sim_device_t* device = downcast(base);
  SLUICE_TRY(reserve_jobs(device, num_events));
  device->num_events = num_events;
  for (int32_t i = 0; i < num_events; ++i) device->begin[i] = device->end[i] = NOT_YET;
  for (int lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    device->lanes[lane] = (sim_lane_t){-1, -1, -1, 0};
    device->busy[lane] = 0;
  }
  device->now = 0;
  device->tokens = device->model.bucket; /* a pause precedes each pass */
  device->comm_ended = 0;
  return SLUICE_OK;
}

static sluice_status_t sim_submit(sluice_device_t* base, const sluice_job_t* job) {
  sim_device_t* device = downcast(base);
  sim_lane_t* lane = &device->lanes[job->lane];
  device->jobs[job->index] = *job;
  device->next_of[job->index] = -1;
  if (lane->last >= 0) device->next_of[lane->last] = job->index;
  if (lane->first < 0) lane->first = job->index;
  lane->last = job->index;
  return SLUICE_OK;
}

static int is_ready(const sim_device_t* device, const sluice_job_t* job) {
  for (int32_t i = 0; i < job->num_waits; ++i) {
    if (device->end[job->waits[i]] < 0) return 0;
  }
  return 1;
}

/* ---- the bucket of the link ---- */

static double filled(const sim_device_t* device, double tokens) {
  return tokens < device->model.bucket ? tokens : device->model.bucket;
}

/* Returns the remaining seconds of a job: it earns tokens while the line waits for its other work, then spends them. */
static double begin_on_line(sim_device_t* device, int32_t index, double seconds) {
  if (device->model.line == NULL) return seconds;
  double line = device->model.line(device->model.user, index);
  double tokens = filled(device, device->tokens + (device->now - device->comm_ended) + (seconds - line));
  double spent = tokens < line ? tokens : line;
  device->tokens = tokens - spent;
  device->comm_needs = seconds - spent;
  return seconds - spent;
}

/* It earned tokens while computation delayed it. */
static void end_on_line(sim_device_t* device, int32_t index) {
  device->tokens = filled(device, device->tokens + (device->now - device->begin[index] - device->comm_needs));
  device->comm_ended = device->now;
}

/* ---- time ---- */

/* Starts every job that can start; returns the set of busy lanes. */
static unsigned start_jobs(sim_device_t* device) {
  unsigned busy = 0;
  for (unsigned l = 0; l < SLUICE_NUM_LANES; ++l) {
    sim_lane_t* lane = &device->lanes[l];
    if (lane->running < 0 && lane->first >= 0 && is_ready(device, &device->jobs[lane->first])) {
      lane->running = lane->first;
      lane->first = device->next_of[lane->first];
      lane->left = device->model.cost(device->model.user, lane->running);
      device->begin[lane->running] = device->now;
      if (l == SLUICE_LANE_COMM) lane->left = begin_on_line(device, lane->running, lane->left);
      if (l == SLUICE_LANE_COMM && device->model.overlap != NULL) {
        device->overlap = device->model.overlap(device->model.user, lane->running);
      }
      const int is_copy = l == SLUICE_LANE_COPY_OUT || l == SLUICE_LANE_COPY_IN;
      if (is_copy && device->model.copy_share != NULL)
        device->share[l] = device->model.copy_share(device->model.user, lane->running);
    }
    if (lane->running >= 0) busy |= 1u << l;
  }
  return busy;
}

static double lane_share(const sim_device_t* device, unsigned lane, unsigned busy) {
  double share = 0; /* the minimum over the copies that run */
  for (unsigned l = 0; l < SLUICE_NUM_LANES; ++l) {
    if (!(busy >> l & 1) || device->share[l] == NULL) continue;
    const double with = device->share[l][lane][busy];
    if (with > 0 && (share == 0 || with < share)) share = with;
  }
  if (share == 0) share = device->model.share[lane][busy];
  return share > 0 ? share : 1;
}

/* If the running exchange defines its overlap with computation, the lanes' shares apply to the other lanes. */
static double speed(const sim_device_t* device, unsigned lane, unsigned busy) {
  const unsigned compute = 1u << SLUICE_LANE_COMPUTE, comm = 1u << SLUICE_LANE_COMM;
  if ((busy & compute) != 0 && (busy & comm) != 0) {
    if (lane == SLUICE_LANE_COMM && device->overlap.own > 0) {
      return lane_share(device, lane, busy & ~compute) * device->overlap.own;
    }
    if (lane == SLUICE_LANE_COMPUTE && device->overlap.compute > 0) {
      return lane_share(device, lane, busy & ~comm) * device->overlap.compute;
    }
  }
  return lane_share(device, lane, busy);
}

/* Advances time to the end of the first running job, and ends all jobs that end then. */
static void advance(sim_device_t* device, unsigned busy) {
  double step = -1;
  for (unsigned l = 0; l < SLUICE_NUM_LANES; ++l) {
    if (!(busy >> l & 1)) continue;
    double needs = device->lanes[l].left / speed(device, l, busy);
    if (step < 0 || needs < step) step = needs;
  }
  device->now += step;
  for (unsigned l = 0; l < SLUICE_NUM_LANES; ++l) {
    sim_lane_t* lane = &device->lanes[l];
    if (!(busy >> l & 1)) continue;
    device->busy[l] += step;
    int ends = lane->left / speed(device, l, busy) <= step;
    lane->left -= step * speed(device, l, busy);
    if (!ends) continue;
    device->end[lane->running] = device->now;
    if (l == SLUICE_LANE_COMM) end_on_line(device, lane->running);
    lane->running = -1;
  }
}

static sluice_status_t sim_join(sluice_device_t* base) {
  sim_device_t* device = downcast(base);
  for (unsigned busy = start_jobs(device); busy != 0; busy = start_jobs(device)) advance(device, busy);
  for (int l = 0; l < SLUICE_NUM_LANES; ++l) {
    if (device->lanes[l].first < 0) continue;
    return SLUICE_FAIL(SLUICE_E_INTERNAL, "sim device: job %d of lane %d waits for ever", device->lanes[l].first, l);
  }
  return SLUICE_OK;
}

static const sluice_device_vtable_t sim_vtable = {
    .destroy = sim_destroy,
    .begin = sim_begin,
    .submit = sim_submit,
    .join = sim_join,
};

sluice_status_t sluice_sim_device_create(const sluice_sim_model_t* model, sluice_allocator_t* allocator,
                                         sluice_device_t** out_device) {
  *out_device = NULL;
  for (int l = 0; l < SLUICE_NUM_LANES; ++l) {
    for (int set = 0; set < 1 << SLUICE_NUM_LANES; ++set) {
      if (model->share[l][set] >= 0 && model->share[l][set] <= 1) continue;
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sim device: share[%d][%d] is %g; it must be in [0, 1]", l, set,
                         model->share[l][set]);
    }
  }
  sim_device_t* device = sluice_alloc_zeroed(allocator, sizeof *device, "sim device");
  if (device == NULL) return sluice_alloc_status();
  device->base = (sluice_device_t){.vtable = &sim_vtable, .allocator = allocator, .name = "sim"};
  device->model = *model;
  *out_device = &device->base;
  return SLUICE_OK;
}

void sluice_sim_device_result(const sluice_device_t* base, sluice_sim_result_t* out_result) {
  const sim_device_t* device = (const sim_device_t*)(const void*)base;
  out_result->total = device->now;
  memcpy(out_result->busy, device->busy, sizeof device->busy);
  out_result->begin = device->begin;
  out_result->end = device->end;
}
