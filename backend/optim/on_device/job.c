// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/on_device/job.h"

#include <float.h>

#include "backend/base/dtype.h"
#include "backend/device/adam_kernels.h"
#include "backend/optim/on_device/sum.h"

/* A run of a part's elements in one tensor: it begins at element `first` of the tensor and `in_part` of the part. */
typedef struct run_s {
  const sluice_adam_group_t* group;
  const sluice_adam_tensor_t* tensor;
  int64_t first, in_part, count;
} run_t;

typedef sluice_status_t (*run_fn_t)(const sluice_device_job_t* job, sluice_stream_t stream,
                                    const sluice_bucket_part_t* part, const run_t* run);

/* Returns the run that begins at element `at` (of all lines) of the part. */
static run_t run_at(const sluice_device_job_t* job, const sluice_bucket_part_t* part, int64_t at) {
  const sluice_line_run_t line = sluice_lines_run(job->lines, at, part->first + part->count);
  return (run_t){line.of->group, line.of->tensor, line.first, at - part->first, line.count};
}

static sluice_status_t for_each_run(const sluice_device_job_t* job, sluice_stream_t stream,
                                    const sluice_bucket_part_t* part, run_fn_t fn) {
  for (int64_t at = part->first; at < part->first + part->count;) {
    const run_t run = run_at(job, part, at);
    SLUICE_TRY(fn(job, stream, part, &run));
    at += run.count;
  }
  return SLUICE_OK;
}

static const void* grad_of(const run_t* run) {
  return (const char*)run->tensor->grad + run->first * (int64_t)sluice_dtype_bytes(run->tensor->grad_dtype);
}

/* ---- states ---- */

static sluice_status_t copy(const sluice_device_job_t* job, sluice_stream_t stream, float* to, const float* from,
                            int64_t count) {
  return job->device->memory->copy(job->device, stream, to, from, (uint64_t)count * sizeof(float));
}

static sluice_status_t copy_run_in(const sluice_device_job_t* job, sluice_stream_t stream,
                                   const sluice_bucket_part_t* part, const run_t* run) {
  const sluice_adam_tensor_t* t = run->tensor;
  SLUICE_TRY(copy(job, stream, part->slot.master + run->in_part, t->master + run->first, run->count));
  SLUICE_TRY(copy(job, stream, part->slot.exp_avg + run->in_part, t->exp_avg + run->first, run->count));
  return copy(job, stream, part->slot.exp_avg_sq + run->in_part, t->exp_avg_sq + run->first, run->count);
}

static sluice_status_t copy_run_out(const sluice_device_job_t* job, sluice_stream_t stream,
                                    const sluice_bucket_part_t* part, const run_t* run) {
  const sluice_adam_tensor_t* t = run->tensor;
  SLUICE_TRY(copy(job, stream, t->master + run->first, part->slot.master + run->in_part, run->count));
  SLUICE_TRY(copy(job, stream, t->exp_avg + run->first, part->slot.exp_avg + run->in_part, run->count));
  return copy(job, stream, t->exp_avg_sq + run->first, part->slot.exp_avg_sq + run->in_part, run->count);
}

static sluice_status_t copy_in(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, copy_run_in);
}

static sluice_status_t copy_out(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, copy_run_out);
}

/* ---- gradients ---- */

static sluice_status_t stage_run(const sluice_device_job_t* job, sluice_stream_t stream,
                                 const sluice_bucket_part_t* part, const run_t* run) {
  return job->device->memory->adam->stage(job->device, stream, grad_of(run), run->tensor->grad_dtype, run->count,
                                          part->grad + run->in_part);
}

/* Sends gradients of one tensor in their dtype, and those of several tensors in f32. */
static sluice_status_t sum(const sluice_device_job_t* job, sluice_comm_t* comm, sluice_stream_t stream,
                           const sluice_bucket_part_t* part) {
  const run_t first = run_at(job, part, part->first);
  const int is_one = first.count == part->count;
  if (!is_one) SLUICE_TRY(for_each_run(job, stream, part, stage_run));
  const sluice_device_sum_t sum = {
      .from = is_one ? grad_of(&first) : part->grad,
      .dtype = is_one ? first.tensor->grad_dtype : SLUICE_DTYPE_F32,
      .count = part->count,
      .out = part->grad,
      .receive = job->receive,
  };
  return sluice_device_sum(job->device, comm, stream, &sum);
}

static sluice_status_t stage(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  const sluice_device_job_t* job = user;
  sluice_comm_t* comm = job->lines->comms[part->line];
  if (comm != NULL && comm->world_size > 1) return sum(job, comm, stream, part);
  return for_each_run(job, stream, part, stage_run);
}

static sluice_status_t look(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  const sluice_device_job_t* job = user;
  return job->device->memory->adam->look(job->device, stream, part->grad, SLUICE_DTYPE_F32, part->count, FLT_MAX,
                                         job->flags);
}

/* ---- updates ---- */

static sluice_status_t update_run(const sluice_device_job_t* job, sluice_stream_t stream,
                                  const sluice_bucket_part_t* part, const run_t* run) {
  const sluice_adam_tensor_t* t = run->tensor;
  const sluice_adam_numbers_t n = sluice_adam_numbers_of(&run->group->rule, t->step, job->grad_scale);
  const sluice_device_adam_t adam = {
      .count = run->count,
      .grad = part->grad + run->in_part,
      .master = part->slot.master + run->in_part,
      .exp_avg = part->slot.exp_avg + run->in_part,
      .exp_avg_sq = part->slot.exp_avg_sq + run->in_part,
      .param = (char*)t->param + run->first * (int64_t)sluice_dtype_bytes(t->param_dtype),
      .dtype = t->param_dtype,
      .numbers = {n.grad_scale, n.l2, n.one_minus_beta1, n.one_minus_beta2, n.decay, n.epsilon_high, n.epsilon_low,
                  n.step_high, n.step_low},
  };
  return job->device->memory->adam->update(job->device, stream, &adam);
}

static sluice_status_t update(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, update_run);
}

/* ---- modes ---- */

const sluice_bucket_mode_t sluice_device_step_mode = {.ops = {
                                                          [SLUICE_BUCKET_COPY_IN] = copy_in,
                                                          [SLUICE_BUCKET_STAGE] = stage,
                                                          [SLUICE_BUCKET_UPDATE] = update,
                                                          [SLUICE_BUCKET_COPY_OUT] = copy_out,
                                                      }};

const sluice_bucket_mode_t sluice_device_look_mode = {.ops = {
                                                          [SLUICE_BUCKET_STAGE] = stage,
                                                          [SLUICE_BUCKET_UPDATE] = look,
                                                      }};
