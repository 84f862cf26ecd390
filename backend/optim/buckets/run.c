// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/buckets/run.h"

typedef struct run_s {
  const sluice_bucket_plan_t* plan;
  char* memory;
  const sluice_bucket_mode_t* mode;
  void* user;
} run_t;

static sluice_bucket_slot_t slot_at(const run_t* run, int32_t slot) {
  if (slot < 0) return (sluice_bucket_slot_t){NULL, NULL, NULL};
  const uint64_t states = sluice_bucket_state_bytes(run->plan->form.bucket, 1), array = states / 3;
  char* at = run->memory + (uint64_t)slot * states;
  return (sluice_bucket_slot_t){(float*)(void*)at, (float*)(void*)(at + array), (float*)(void*)(at + 2 * array)};
}

static sluice_status_t run_op(void* user, int32_t index, sluice_stream_t stream) {
  const run_t* run = user;
  const sluice_bucket_plan_t* plan = run->plan;
  const sluice_bucket_op_t* op = plan->ops + index;
  float* grads = (float*)(void*)(run->memory + sluice_bucket_state_bytes(plan->form.bucket, plan->form.num_slots));
  const sluice_bucket_part_t part = {
      .first = op->first,
      .count = op->count,
      .line = op->line,
      .slot = slot_at(run, op->state_slot),
      .grad = op->grad_slot < 0 ? NULL : grads + op->grad_at,
      .grads = grads,
  };
  return run->mode->ops[op->kind](run->user, stream, &part);
}

static sluice_status_t submit_all(sluice_device_t* device, const sluice_bucket_plan_t* plan,
                                  const sluice_bucket_mode_t* mode) {
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    const sluice_job_t job = {.index = i,
                              .lane = op->lane,
                              .waits = op->waits,
                              .num_waits = op->num_waits,
                              .run_on_failure = mode->runs_on_failure[op->kind]};
    SLUICE_TRY(device->vtable->submit(device, &job));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_bucket_run(sluice_device_t* device, const sluice_bucket_plan_t* plan, void* memory,
                                  const sluice_bucket_mode_t* mode, void* user, sluice_stream_t stream) {
  run_t run = {plan, memory, mode, user};
  if (plan->num_ops == 0) return SLUICE_OK;
  SLUICE_TRY(device->vtable->begin(device, plan->num_ops, run_op, &run, stream));
  const sluice_status_t submitted = submit_all(device, plan, mode);
  sluice_error_info_t why;
  if (submitted != SLUICE_OK) sluice_error_capture(&why);
  const sluice_status_t joined = device->vtable->join(device);
  return submitted == SLUICE_OK ? joined : sluice_error_adopt(&why);
}
