#include "backend/optim/buckets/run.h"

#include "backend/base/check.h"
#include "backend/base/math.h"

typedef struct run_s {
  const sluice_bucket_plan_t* plan;
  char* memory;
  const sluice_bucket_mode_t* mode;
  void* user;
} run_t;

static sluice_bucket_slot_t slot_at(const run_t* run, int32_t slot) {
  const uint64_t array = sluice_bucket_slot_bytes(run->plan->bucket, 1) / 4;
  char* at = run->memory + (uint64_t)slot * 4 * array;
  return (sluice_bucket_slot_t){(float*)(void*)at, (float*)(void*)(at + array), (float*)(void*)(at + 2 * array),
                                (float*)(void*)(at + 3 * array)};
}

static sluice_status_t run_op(void* user, int32_t index, sluice_stream_t stream) {
  const run_t* run = user;
  const sluice_bucket_op_t* op = run->plan->ops + index;
  const int64_t first = op->bucket * run->plan->bucket;
  const sluice_bucket_part_t part = {first, sluice_min(run->plan->bucket, run->plan->count - first),
                                     slot_at(run, op->slot)};
  return run->mode->ops[op->kind](run->user, stream, &part);
}

static sluice_status_t submit_all(sluice_device_t* device, const sluice_bucket_plan_t* plan) {
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    const sluice_job_t job = {.index = i, .lane = op->lane, .waits = op->waits, .num_waits = op->num_waits};
    SLUICE_TRY(device->vtable->submit(device, &job));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_bucket_run(sluice_device_t* device, const sluice_bucket_plan_t* plan, void* memory,
                                  const sluice_bucket_mode_t* mode, void* user, sluice_stream_t stream) {
  run_t run = {plan, memory, mode, user};
  if (plan->num_ops == 0) return SLUICE_OK;
  SLUICE_TRY(device->vtable->begin(device, plan->num_ops, run_op, &run, stream));
  const sluice_status_t submitted = submit_all(device, plan);
  sluice_error_info_t why;
  if (submitted != SLUICE_OK) sluice_error_capture(&why);
  const sluice_status_t joined = device->vtable->join(device);
  return submitted == SLUICE_OK ? joined : sluice_error_adopt(&why);
}
