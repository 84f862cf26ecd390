// SPDX-License-Identifier: Apache-2.0
/* Probes on a device whose memory the host cannot access: a sample is a pass of jobs, which the device times with
 * events on their lanes. The host enqueues on the default stream and waits once per sample. */
#include "backend/calibrate/probe.h"

typedef struct pass_s {
  sluice_bench_t* bench;
  const sluice_bench_job_t* jobs; /* NULL: empty jobs */
} pass_t;

/* ---- memory ---- */

sluice_status_t sluice_bench_open_on_device(sluice_bench_t* b) {
  sluice_device_t* device = b->context->device;
  int32_t captured = 0;
  void* pinned = NULL;
  device->memory->init_memory(device, NULL, NULL, NULL, &b->device_memory);
  SLUICE_TRY(device->memory->open(device, NULL, &captured));
  if (captured) return SLUICE_FAIL(SLUICE_E_STATE, "calibration: the default stream is being captured into a graph");
  b->memory = sluice_alloc(&b->device_memory, b->bytes, "calibration");
  if (b->memory == NULL) return sluice_alloc_status();
  SLUICE_TRY(device->memory->take(device, NULL, &b->device_memory, 1, (uint64_t)SLUICE_BENCH_BYTES, 0, &pinned));
  b->copied = pinned;
  return device->memory->fill(device, NULL, b->memory, 0x3c, b->bytes); /* small finite numbers in every dtype */
}

/* Waits until the device has finished everything that was enqueued. */
static sluice_status_t wait_on_device(sluice_bench_t* b) {
  sluice_device_t* device = b->context->device;
  float word = 0;
  return device->memory->read(device, NULL, b->scalars, &word, sizeof word);
}

sluice_status_t sluice_bench_send_tables_on_device(sluice_bench_t* b) {
  sluice_device_t* device = b->context->device;
  int32_t* index = (int32_t*)(void*)b->copied;
  float* scalars = (float*)(void*)(b->copied + SLUICE_BENCH_ROWS * sizeof *index);
  sluice_bench_fill_tables(index, scalars);
  SLUICE_TRY(device->memory->copy(device, NULL, b->index, index, SLUICE_BENCH_ROWS * sizeof *index));
  SLUICE_TRY(device->memory->copy(device, NULL, b->scalars, scalars, SLUICE_BENCH_ROWS * sizeof *scalars));
  return wait_on_device(b);
}

void sluice_bench_close_on_device(sluice_bench_t* b) {
  sluice_device_t* device = b->context->device;
  device->memory->give(device, 1, b->copied);
  sluice_free(&b->device_memory, b->memory, b->bytes);
  sluice_allocator_deinit(&b->device_memory);
  device->memory->clock->time_ops(device, 0); /* the next pass sets it again */
}

/* ---- passes ---- */

static sluice_status_t run_job(void* user, int32_t index, sluice_stream_t stream) {
  const pass_t* pass = user;
  if (pass->jobs == NULL) return SLUICE_OK;
  return sluice_bench_run(pass->bench, pass->jobs[index].probe, pass->jobs[index].repeats, stream);
}

enum { MOST_TOGETHER = 3, MOST_LAUNCHES = 256 };

/* Begin and end of each job, in ns since the start of the pass. */
static sluice_status_t run_pass(pass_t* pass, int32_t count, uint64_t* begin_ns, uint64_t* end_ns) {
  sluice_device_t* device = pass->bench->context->device;
  int32_t captured = 0, before[MOST_LAUNCHES];
  sluice_job_t jobs[MOST_LAUNCHES];
  for (int32_t i = 0; i < count; ++i) {
    int32_t lane = i % 2 ? SLUICE_LANE_COMM : SLUICE_LANE_COMPUTE;
    if (pass->jobs != NULL) lane = pass->jobs[i].lane;
    before[i] = i - 1;
    jobs[i] = (sluice_job_t){i, lane, &before[i], pass->jobs == NULL && i > 0, 1};
  }
  device->memory->clock->time_ops(device, 1);
  SLUICE_TRY(device->memory->open(device, NULL, &captured));
  SLUICE_TRY(sluice_bench_run_jobs(pass->bench, jobs, count, run_job, pass));
  SLUICE_TRY(wait_on_device(pass->bench));
  if (device->memory->clock->op_times(device, count, begin_ns, end_ns) == SLUICE_OP_TIMES_TAKEN) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "calibration: device %s did not record the times of its jobs", device->name);
}

sluice_status_t sluice_bench_run_on_device(sluice_bench_t* b, sluice_bench_job_t* jobs, int32_t count) {
  uint64_t begin_ns[MOST_TOGETHER], end_ns[MOST_TOGETHER];
  pass_t pass = {b, jobs};
  SLUICE_TRY(run_pass(&pass, count, begin_ns, end_ns));
  for (int32_t i = 0; i < count; ++i) jobs[i].seconds = (double)(end_ns[i] - begin_ns[i]) * 1e-9;
  return SLUICE_OK;
}

sluice_status_t sluice_bench_launch_on_device(sluice_bench_t* b, int32_t count, double* out_seconds) {
  uint64_t begin_ns[MOST_LAUNCHES], end_ns[MOST_LAUNCHES];
  pass_t pass = {b, NULL};
  SLUICE_TRY(run_pass(&pass, count, begin_ns, end_ns));
  *out_seconds = (double)(end_ns[count - 1] - begin_ns[0]) * 1e-9;
  return SLUICE_OK;
}
