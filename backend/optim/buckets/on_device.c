#include "backend/optim/buckets/on_device.h"

#include <stdio.h>

#include "backend/base/check.h"
#include "backend/base/dtype.h"
#include "backend/device/adam_kernels.h"
#include "backend/optim/adam_step.h"
#include "backend/optim/buckets/run.h"
#include "backend/optim/lines.h"

struct sluice_device_buckets_s {
  sluice_device_t* device;
  sluice_allocator_t *memory, *allocator;
  int64_t bucket;
  int32_t num_slots;
  void* slots;
};

/* ---- life ---- */

uint64_t sluice_device_buckets_bytes(int64_t bucket, int32_t num_slots) {
  return sluice_bucket_state_bytes(bucket, num_slots) +
         (uint64_t)num_slots * sluice_align_up((uint64_t)bucket * sizeof(float));
}

static sluice_status_t check_form(const sluice_device_t* device, int64_t bucket, int32_t num_slots) {
  const int64_t most = INT64_C(1) << 40; /* far from an overflow of bytes */
  if (device->memory == NULL || device->memory->adam == NULL) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "optimizer: device %s works in host memory, where a step needs no buckets; leave them out",
                       device->name);
  }
  SLUICE_TRY(SLUICE_REQUIRE(bucket >= 1 && bucket <= most,
                            "optimizer: buckets of %lld elements on a device; give 1 to 2^40", (long long)bucket));
  return SLUICE_REQUIRE(num_slots >= 1 && num_slots <= SLUICE_BUCKET_MAX_SLOTS,
                        "optimizer: %d slots for buckets on a device; give 1, or 2 for copies beside updates",
                        num_slots);
}

sluice_status_t sluice_device_buckets_create(sluice_device_t* device, sluice_allocator_t* memory,
                                             sluice_allocator_t* allocator, int64_t bucket, int32_t num_slots,
                                             sluice_device_buckets_t** out_buckets) {
  *out_buckets = NULL;
  SLUICE_TRY(check_form(device, bucket, num_slots));
  sluice_device_buckets_t* buckets = sluice_alloc_zeroed(allocator, sizeof *buckets, "optimizer: buckets");
  if (buckets == NULL) return sluice_alloc_status();
  *buckets = (sluice_device_buckets_t){device, memory, allocator, bucket, num_slots, NULL};
  buckets->slots =
      sluice_alloc(memory, sluice_device_buckets_bytes(bucket, num_slots), "optimizer: buckets on the device");
  if (buckets->slots == NULL) {
    sluice_device_buckets_destroy(buckets);
    return sluice_alloc_status();
  }
  *out_buckets = buckets;
  return SLUICE_OK;
}

void sluice_device_buckets_destroy(sluice_device_buckets_t* buckets) {
  if (buckets == NULL) return;
  if (buckets->slots != NULL) {
    sluice_free(buckets->memory, buckets->slots, sluice_device_buckets_bytes(buckets->bucket, buckets->num_slots));
  }
  sluice_free(buckets->allocator, buckets, sizeof *buckets);
}

/* ---- the ops of a step ---- */

typedef struct job_s {
  sluice_device_t* device;
  const sluice_lines_t* lines;
  double grad_scale;
} job_t;

/* A run of a part's elements: of one tensor, from its element `first` on, and from the part's `in_part`. */
typedef struct run_s {
  const sluice_adam_group_t* group;
  const sluice_adam_tensor_t* tensor;
  int64_t first, in_part, count;
} run_t;

typedef sluice_status_t (*run_fn_t)(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                    const run_t* run);

static sluice_status_t for_each_run(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                    run_fn_t fn) {
  const int64_t end = part->first + part->count;
  for (int64_t at = part->first; at < end;) {
    const sluice_line_run_t line = sluice_lines_run(job->lines, at, end);
    const run_t run = {line.of->group, line.of->tensor, line.first, at - part->first, line.count};
    SLUICE_TRY(fn(job, stream, part, &run));
    at += run.count;
  }
  return SLUICE_OK;
}

static sluice_status_t copy(const job_t* job, sluice_stream_t stream, float* to, const float* from, int64_t count) {
  return job->device->memory->copy(job->device, stream, to, from, (uint64_t)count * sizeof(float));
}

static sluice_status_t copy_run_in(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                   const run_t* run) {
  const sluice_adam_tensor_t* t = run->tensor;
  SLUICE_TRY(copy(job, stream, part->slot.master + run->in_part, t->master + run->first, run->count));
  SLUICE_TRY(copy(job, stream, part->slot.exp_avg + run->in_part, t->exp_avg + run->first, run->count));
  return copy(job, stream, part->slot.exp_avg_sq + run->in_part, t->exp_avg_sq + run->first, run->count);
}

static sluice_status_t copy_run_out(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                    const run_t* run) {
  const sluice_adam_tensor_t* t = run->tensor;
  SLUICE_TRY(copy(job, stream, t->master + run->first, part->slot.master + run->in_part, run->count));
  SLUICE_TRY(copy(job, stream, t->exp_avg + run->first, part->slot.exp_avg + run->in_part, run->count));
  return copy(job, stream, t->exp_avg_sq + run->first, part->slot.exp_avg_sq + run->in_part, run->count);
}

static sluice_status_t stage_run(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                 const run_t* run) {
  const sluice_adam_tensor_t* t = run->tensor;
  const char* grad = (const char*)t->grad + run->first * (int64_t)sluice_dtype_bytes(t->grad_dtype);
  return job->device->memory->adam->stage(job->device, stream, grad, t->grad_dtype, run->count,
                                          part->grad + run->in_part);
}

static sluice_status_t update_run(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                  const run_t* run) {
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

static sluice_status_t copy_in(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, copy_run_in);
}

static sluice_status_t stage(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, stage_run);
}

static sluice_status_t update(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, update_run);
}

static sluice_status_t copy_out(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, copy_run_out);
}

static const sluice_bucket_mode_t mode = {.ops = {
                                              [SLUICE_BUCKET_COPY_IN] = copy_in,
                                              [SLUICE_BUCKET_STAGE] = stage,
                                              [SLUICE_BUCKET_UPDATE] = update,
                                              [SLUICE_BUCKET_COPY_OUT] = copy_out,
                                          }};

/* ---- what is refused ---- */

static sluice_status_t check_array(const sluice_device_buckets_t* buckets, const void* data, int32_t dtype,
                                   int64_t count, const char* array, int64_t group, int64_t tensor) {
  char name[96];
  const uint64_t width = sluice_dtype_bytes(dtype);
  snprintf(name, sizeof name, "optimizer: tensor %lld of group %lld: %s", (long long)tensor, (long long)group, array);
  return buckets->device->memory->check_memory(buckets->device, data, (uint64_t)count * width, width, name);
}

static sluice_status_t check_tensor(const sluice_device_buckets_t* buckets, const sluice_adam_tensor_t* t,
                                    int64_t group, int64_t index) {
  SLUICE_TRY(SLUICE_REQUIRE(t->count == 0 || t->master != NULL,
                            "optimizer: tensor %lld of group %lld: master is NULL; a step on a device updates masters "
                            "in host memory, so give it one",
                            (long long)index, (long long)group));
  SLUICE_TRY(check_array(buckets, t->param, t->param_dtype, t->count, "param", group, index));
  return check_array(buckets, t->grad, t->grad_dtype, t->count, "grad", group, index);
}

static sluice_status_t check_step(const sluice_device_buckets_t* buckets, const sluice_adam_step_t* step) {
  SLUICE_TRY(sluice_adam_check_step(step));
  if (step->max_norm > 0.0) {
    return SLUICE_FAIL(
        SLUICE_E_UNSUPPORTED,
        "optimizer: max_norm is %g, and a step on a device has no norm of its gradients; clip them before "
        "it, or multiply loss_scale by what clipping would divide by",
        step->max_norm);
  }
  for (int64_t g = 0; g < step->num_groups; ++g) {
    for (int64_t t = 0; t < step->groups[g].num_tensors; ++t) {
      SLUICE_TRY(check_tensor(buckets, step->groups[g].tensors + t, g, t));
    }
  }
  return SLUICE_OK;
}

/* ---- a step ---- */

/* The flag lies where the first bucket's states will: no byte more. */
static sluice_status_t look(const sluice_device_buckets_t* buckets, const sluice_lines_t* lines, sluice_stream_t stream,
                            int32_t* out_is_bad) {
  const sluice_device_memory_t* memory = buckets->device->memory;
  int32_t* flag = buckets->slots;
  SLUICE_TRY(memory->fill(buckets->device, stream, flag, 0, sizeof *flag));
  for (int64_t i = 0; i < lines->num_tensors; ++i) {
    const sluice_adam_tensor_t* t = lines->tensors[i].tensor;
    SLUICE_TRY(memory->adam->look(buckets->device, stream, t->grad, t->grad_dtype, t->count, flag));
  }
  return memory->read(buckets->device, stream, flag, out_is_bad, sizeof *flag);
}

static sluice_status_t run_buckets(const sluice_device_buckets_t* buckets, const sluice_lines_t* lines,
                                   double grad_scale, sluice_stream_t stream) {
  const sluice_bucket_form_t form = {.counts = lines->counts,
                                     .num_lines = lines->num_lines,
                                     .num_slots = buckets->num_slots,
                                     .bucket = buckets->bucket,
                                     .chunk = 1,
                                     .num_grad_slots = buckets->num_slots};
  job_t job = {buckets->device, lines, grad_scale};
  sluice_bucket_plan_t* plan = NULL;
  SLUICE_TRY(sluice_bucket_plan_create(&form, buckets->allocator, &plan));
  const sluice_status_t status = sluice_bucket_run(buckets->device, plan, buckets->slots, &mode, &job, stream);
  sluice_bucket_plan_destroy(plan, buckets->allocator);
  return status;
}

static sluice_status_t step_over(const sluice_device_buckets_t* buckets, const sluice_adam_step_t* step,
                                 const sluice_lines_t* lines, sluice_stream_t stream, int32_t* out_is_skipped) {
  int32_t is_captured = 0;
  if (lines->num_elements == 0) return SLUICE_OK;
  SLUICE_TRY(buckets->device->memory->open(buckets->device, stream, &is_captured));
  if (is_captured) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "optimizer: the stream is being captured, and a step has other numbers every time: take it "
                       "outside of the graph");
  }
  if (step->looks_first) SLUICE_TRY(look(buckets, lines, stream, out_is_skipped));
  return *out_is_skipped ? SLUICE_OK : run_buckets(buckets, lines, 1.0 / step->loss_scale, stream);
}

sluice_status_t sluice_device_buckets_step(sluice_device_buckets_t* buckets, const sluice_adam_step_t* step,
                                           sluice_stream_t stream, int32_t* out_is_skipped) {
  sluice_lines_t lines;
  *out_is_skipped = 0;
  SLUICE_TRY(check_step(buckets, step));
  SLUICE_TRY(sluice_lines_make(step->groups, step->num_groups, NULL, buckets->allocator, &lines));
  const sluice_status_t status = step_over(buckets, step, &lines, stream, out_is_skipped);
  sluice_lines_free(&lines, buckets->allocator);
  return status;
}
