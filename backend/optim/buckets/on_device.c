#include "backend/optim/buckets/on_device.h"

#include "backend/base/check.h"
#include "backend/base/dtype.h"
#include "backend/device/adam_kernels.h"

struct sluice_device_buckets_s {
  sluice_device_t* device;
  sluice_allocator_t *memory, *allocator;
  sluice_bucket_plan_t* plan;
  void* slots;
};

/* ---- life ---- */

static sluice_status_t acquire(sluice_device_buckets_t* buckets, int64_t count, int64_t bucket, int32_t num_slots) {
  const sluice_bucket_form_t form = {.counts = &count,
                                     .num_lines = 1,
                                     .num_slots = num_slots,
                                     .bucket = bucket,
                                     .chunk = 1,
                                     .num_grad_slots = num_slots};
  SLUICE_TRY(SLUICE_REQUIRE(num_slots > 0, "optimizer: %d slots for buckets on a device; give 1 or 2", num_slots));
  SLUICE_TRY(sluice_bucket_plan_create(&form, buckets->allocator, &buckets->plan));
  buckets->slots =
      sluice_alloc(buckets->memory, sluice_bucket_plan_bytes(buckets->plan), "optimizer: buckets on the device");
  return buckets->slots != NULL ? SLUICE_OK : sluice_alloc_status();
}

sluice_status_t sluice_device_buckets_create(sluice_device_t* device, sluice_allocator_t* memory,
                                             sluice_allocator_t* allocator, int64_t count, int64_t bucket,
                                             int32_t num_slots, sluice_device_buckets_t** out_buckets) {
  *out_buckets = NULL;
  if (device->memory == NULL || device->memory->adam == NULL) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "optimizer: device %s works in host memory, where a step needs no buckets; leave them out",
                       device->name);
  }
  sluice_device_buckets_t* buckets = sluice_alloc_zeroed(allocator, sizeof *buckets, "optimizer: buckets");
  if (buckets == NULL) return sluice_alloc_status();
  *buckets = (sluice_device_buckets_t){.device = device, .memory = memory, .allocator = allocator};
  const sluice_status_t status = acquire(buckets, count, bucket, num_slots);
  if (status != SLUICE_OK) {
    sluice_device_buckets_destroy(buckets);
    return status;
  }
  *out_buckets = buckets;
  return SLUICE_OK;
}

void sluice_device_buckets_destroy(sluice_device_buckets_t* buckets) {
  if (buckets == NULL) return;
  if (buckets->slots != NULL) sluice_free(buckets->memory, buckets->slots, sluice_bucket_plan_bytes(buckets->plan));
  sluice_bucket_plan_destroy(buckets->plan, buckets->allocator);
  sluice_free(buckets->allocator, buckets, sizeof *buckets);
}

/* ---- the ops of a step ---- */

typedef struct job_s {
  sluice_device_t* device;
  const sluice_device_buckets_step_t* step;
  sluice_device_adam_numbers_t numbers;
} job_t;

static const char* elements(const job_t* job, const void* data, int64_t first) {
  return (const char*)data + first * (int64_t)sluice_dtype_bytes(job->step->dtype);
}

static sluice_status_t copy_states(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                   int is_in) {
  float* const there[] = {part->slot.master, part->slot.exp_avg, part->slot.exp_avg_sq};
  float* const here[] = {job->step->master, job->step->exp_avg, job->step->exp_avg_sq};
  for (int i = 0; i < 3; ++i) {
    float* host = here[i] + part->first;
    SLUICE_TRY(job->device->memory->copy(job->device, stream, is_in ? there[i] : host, is_in ? host : there[i],
                                         (uint64_t)part->count * sizeof(float)));
  }
  return SLUICE_OK;
}

static sluice_status_t copy_in(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return copy_states(user, stream, part, 1);
}

static sluice_status_t copy_out(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return copy_states(user, stream, part, 0);
}

static sluice_status_t stage(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  const job_t* job = user;
  return job->device->memory->adam->stage(job->device, stream, elements(job, job->step->grad, part->first),
                                          job->step->dtype, part->count, part->grad);
}

static sluice_status_t update(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  const job_t* job = user;
  const sluice_device_adam_t adam = {
      .count = part->count,
      .grad = part->grad,
      .master = part->slot.master,
      .exp_avg = part->slot.exp_avg,
      .exp_avg_sq = part->slot.exp_avg_sq,
      .param = (void*)(uintptr_t)elements(job, job->step->param, part->first),
      .dtype = job->step->dtype,
      .numbers = job->numbers,
  };
  return job->device->memory->adam->update(job->device, stream, &adam);
}

static const sluice_bucket_mode_t mode = {.ops = {
                                              [SLUICE_BUCKET_COPY_IN] = copy_in,
                                              [SLUICE_BUCKET_STAGE] = stage,
                                              [SLUICE_BUCKET_UPDATE] = update,
                                              [SLUICE_BUCKET_COPY_OUT] = copy_out,
                                          }};

/* ---- a step ---- */

static sluice_status_t check(const sluice_device_buckets_t* buckets, const sluice_device_buckets_step_t* step) {
  const int is_real =
      step->dtype == SLUICE_DTYPE_F32 || step->dtype == SLUICE_DTYPE_BF16 || step->dtype == SLUICE_DTYPE_F16;
  SLUICE_TRY(sluice_adam_check(&step->rule));
  SLUICE_TRY(
      SLUICE_REQUIRE(step->step >= 1, "optimizer: step %lld; the first step is number 1", (long long)step->step));
  SLUICE_TRY(SLUICE_REQUIRE(is_real, "optimizer: dtype is %s (%d); known are f32, bf16 and f16",
                            sluice_dtype_name(step->dtype), step->dtype));
  const uint64_t bytes = (uint64_t)buckets->plan->count * sluice_dtype_bytes(step->dtype);
  const uint64_t alignment = sluice_dtype_bytes(step->dtype);
  const sluice_device_memory_t* memory = buckets->device->memory;
  SLUICE_TRY(memory->check_memory(buckets->device, step->grad, bytes, alignment, "grad"));
  return memory->check_memory(buckets->device, step->param, bytes, alignment, "param");
}

/* The flag lies where the first bucket's states will: no byte more. */
static sluice_status_t look(const sluice_device_buckets_t* buckets, const sluice_device_buckets_step_t* step,
                            sluice_stream_t stream, int32_t* out_is_bad) {
  const sluice_device_memory_t* memory = buckets->device->memory;
  int32_t* flag = buckets->slots;
  SLUICE_TRY(memory->fill(buckets->device, stream, flag, 0, sizeof *flag));
  SLUICE_TRY(memory->adam->look(buckets->device, stream, step->grad, step->dtype, buckets->plan->count, flag));
  return memory->read(buckets->device, stream, flag, out_is_bad, sizeof *flag);
}

sluice_status_t sluice_device_buckets_step(sluice_device_buckets_t* buckets, const sluice_device_buckets_step_t* step,
                                           sluice_stream_t stream, int32_t* out_is_skipped) {
  int32_t is_captured = 0;
  *out_is_skipped = 0;
  SLUICE_TRY(check(buckets, step));
  if (buckets->plan->count == 0) return SLUICE_OK;
  SLUICE_TRY(buckets->device->memory->open(buckets->device, stream, &is_captured));
  SLUICE_TRY(look(buckets, step, stream, out_is_skipped));
  if (*out_is_skipped) return SLUICE_OK;
  const sluice_adam_numbers_t n = sluice_adam_numbers_of(&step->rule, step->step, step->grad_scale);
  job_t job = {
      .device = buckets->device,
      .step = step,
      .numbers = {n.grad_scale, n.l2, n.one_minus_beta1, n.one_minus_beta2, n.decay, n.epsilon_high, n.epsilon_low,
                  n.step_high, n.step_low},
  };
  return sluice_bucket_run(buckets->device, buckets->plan, buckets->slots, &mode, &job, stream);
}
