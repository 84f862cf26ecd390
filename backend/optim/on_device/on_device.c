// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/on_device/on_device.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

#include "backend/base/alloc.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/comm/comm.h"
#include "backend/comm/exchange_arrays.h"
#include "backend/device/adam_kernels.h"
#include "backend/device/device.h"
#include "backend/optim/bucketed/handshake.h"
#include "backend/optim/buckets/plan.h"
#include "backend/optim/lines.h"

/* ---- sums over ranks ---- */

typedef struct sum_s {
  const void* from; /* this rank's gradients, sent in `dtype`; may be `out` if that is f32 */
  int32_t dtype;
  int64_t count;
  float* out;    /* [count] */
  void* receive; /* sluice_device_sum_receive_bytes() */
} sum_t;

static int64_t longest_slice(int64_t count, int32_t world_size) { return sluice_ceil_div(count, world_size); }

uint64_t sluice_device_sum_receive_bytes(int64_t count, int32_t world_size) {
  return sluice_align_up((uint64_t)(longest_slice(count, world_size) * world_size) * sizeof(float));
}

static sluice_status_t exchange(sluice_comm_t* comm, const sluice_exchange_arrays_t* arrays, sluice_stream_t stream) {
  const sluice_exchange_t all = sluice_exchange_of(arrays);
  return sluice_comm_exchange_enqueue(comm, &all, stream);
}

/* Receives this rank's slice of every rank's gradients, in rank order. */
static sluice_status_t scatter(sluice_device_t* device, sluice_comm_t* comm, sluice_stream_t stream, const sum_t* sum,
                               const sluice_exchange_arrays_t* arrays) {
  const int32_t w = comm->world_size, me = comm->rank;
  const int64_t width = (int64_t)sluice_dtype_bytes(sum->dtype), stride = longest_slice(sum->count, w) * width;
  const sluice_slice_t mine = sluice_slice_of(sum->count, me, w);
  for (int32_t r = 0; r < w; ++r) {
    const sluice_slice_t slice = sluice_slice_of(sum->count, r, w);
    arrays->send[r] = (const char*)sum->from + slice.begin * width;
    arrays->recv[r] = (char*)sum->receive + r * stride;
    arrays->send_bytes[r] = r == me ? 0 : (uint64_t)(slice.count * width);
    arrays->recv_bytes[r] = r == me ? 0 : (uint64_t)(mine.count * width);
  }
  SLUICE_TRY(device->memory->copy(device, stream, arrays->recv[me], arrays->send[me], (uint64_t)(mine.count * width)));
  return exchange(comm, arrays, stream);
}

static sluice_status_t add(sluice_device_t* device, const sluice_comm_t* comm, sluice_stream_t stream,
                           const sum_t* sum) {
  const sluice_slice_t mine = sluice_slice_of(sum->count, comm->rank, comm->world_size);
  if (mine.count == 0) return SLUICE_OK;
  const sluice_device_parts_t parts = {sum->receive, sum->dtype, comm->world_size,
                                       longest_slice(sum->count, comm->world_size)};
  return device->memory->adam->sum(device, stream, &parts, mine.count, sum->out + mine.begin);
}

static sluice_status_t gather(sluice_comm_t* comm, sluice_stream_t stream, const sum_t* sum,
                              const sluice_exchange_arrays_t* arrays) {
  const int32_t w = comm->world_size, me = comm->rank;
  const sluice_slice_t mine = sluice_slice_of(sum->count, me, w);
  for (int32_t r = 0; r < w; ++r) {
    const sluice_slice_t slice = sluice_slice_of(sum->count, r, w);
    arrays->send[r] = sum->out + mine.begin;
    arrays->recv[r] = sum->out + slice.begin;
    arrays->send_bytes[r] = r == me ? 0 : (uint64_t)mine.count * sizeof(float);
    arrays->recv_bytes[r] = r == me ? 0 : (uint64_t)slice.count * sizeof(float);
  }
  return exchange(comm, arrays, stream);
}

/* Each rank sums its slice, and all ranks get all slices: in rank order and in f32, the bits of sluice_comm_sum_f32.
 * comm: at least two ranks, with exchanges of device memory. Errors: NO_MEMORY, and errors of exchanges and kernels.
 * After any error the ranks are out of step: the caller ends comm. */
static sluice_status_t sum_over_ranks(sluice_device_t* device, sluice_comm_t* comm, sluice_stream_t stream,
                                      const sum_t* sum) {
  const uint64_t bytes = sluice_exchange_arrays_bytes(comm->world_size);
  void* block = sluice_alloc(sluice_process_allocator(), bytes, "optimizer: a sum on a device");
  if (block == NULL) return sluice_alloc_status();
  const sluice_exchange_arrays_t arrays = sluice_exchange_arrays_in(block, comm->world_size);
  sluice_status_t status = scatter(device, comm, stream, sum, &arrays);
  if (status == SLUICE_OK) status = add(device, comm, stream, sum);
  if (status == SLUICE_OK) status = gather(comm, stream, sum, &arrays);
  sluice_free(sluice_process_allocator(), block, bytes);
  return status;
}

/* ---- the ops of a step ---- */

typedef struct job_s {
  sluice_device_t* device;
  const sluice_lines_t* lines;
  double grad_scale;
  void* receive;  /* receive buffer of sums over ranks */
  int32_t* flags; /* [2], on the device: results of scans (adam_kernels.h) */
} job_t;

/* A run of a part's elements in one tensor: it begins at element `first` of the tensor and `in_part` of the part. */
typedef struct run_s {
  const sluice_adam_group_t* group;
  const sluice_adam_tensor_t* tensor;
  int64_t first, in_part, count;
} run_t;

typedef sluice_status_t (*run_fn_t)(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                    const run_t* run);

/* Returns the run that begins at element `at` (of all lines) of the part. */
static run_t run_at(const job_t* job, const sluice_bucket_part_t* part, int64_t at) {
  const sluice_line_run_t line = sluice_lines_run(job->lines, at, part->first + part->count);
  return (run_t){line.of->group, line.of->tensor, line.first, at - part->first, line.count};
}

static sluice_status_t for_each_run(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                    run_fn_t fn) {
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

static sluice_status_t copy_in(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, copy_run_in);
}

static sluice_status_t copy_out(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, copy_run_out);
}

/* ---- gradients ---- */

static sluice_status_t stage_run(const job_t* job, sluice_stream_t stream, const sluice_bucket_part_t* part,
                                 const run_t* run) {
  return job->device->memory->adam->stage(job->device, stream, grad_of(run), run->tensor->grad_dtype, run->count,
                                          part->grad + run->in_part);
}

/* Sends gradients of one tensor in their dtype, and those of several tensors in f32. */
static sluice_status_t sum_part(const job_t* job, sluice_comm_t* comm, sluice_stream_t stream,
                                const sluice_bucket_part_t* part) {
  const run_t first = run_at(job, part, part->first);
  const int is_one = first.count == part->count;
  if (!is_one) SLUICE_TRY(for_each_run(job, stream, part, stage_run));
  const sum_t sum = {
      .from = is_one ? grad_of(&first) : part->grad,
      .dtype = is_one ? first.tensor->grad_dtype : SLUICE_DTYPE_F32,
      .count = part->count,
      .out = part->grad,
      .receive = job->receive,
  };
  return sum_over_ranks(job->device, comm, stream, &sum);
}

static sluice_status_t stage(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  const job_t* job = user;
  sluice_comm_t* comm = job->lines->comms[part->line];
  if (comm != NULL && comm->world_size > 1) return sum_part(job, comm, stream, part);
  return for_each_run(job, stream, part, stage_run);
}

static sluice_status_t look_at_part(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  const job_t* job = user;
  return job->device->memory->adam->look(job->device, stream, part->grad, SLUICE_DTYPE_F32, part->count, FLT_MAX,
                                         job->flags);
}

/* ---- updates ---- */

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

static sluice_status_t update(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  return for_each_run(user, stream, part, update_run);
}

/* ---- modes ---- */

static const sluice_bucket_mode_t step_mode = {.ops = {
                                                   [SLUICE_BUCKET_COPY_IN] = copy_in,
                                                   [SLUICE_BUCKET_STAGE] = stage,
                                                   [SLUICE_BUCKET_UPDATE] = update,
                                                   [SLUICE_BUCKET_COPY_OUT] = copy_out,
                                               }};

/* Before a step in which a sum may overflow f32: forms the sums, and scans them in place of updates. */
static const sluice_bucket_mode_t look_mode = {.ops = {
                                                   [SLUICE_BUCKET_STAGE] = stage,
                                                   [SLUICE_BUCKET_UPDATE] = look_at_part,
                                               }};

/* ---- buckets ---- */

enum { DEFAULT_CHUNK = 2 /* the value of the paper */ };

struct sluice_device_buckets_s {
  sluice_device_t* device;
  sluice_allocator_t *memory, *allocator;
  int64_t bucket;
  int32_t num_slots;
  void* slots; /* slots of states, then of gradients, then the receive buffer of sums */
  uint64_t bytes;
};

/* ---- create and destroy ---- */

uint64_t sluice_device_buckets_bytes(int64_t bucket, int32_t num_slots) {
  return sluice_bucket_state_bytes(bucket, num_slots) +
         (uint64_t)num_slots * sluice_align_up((uint64_t)bucket * sizeof(float));
}

static sluice_status_t check_form(const sluice_device_t* device, int64_t bucket, int32_t num_slots) {
  const int64_t most = INT64_C(1) << 40; /* far below an overflow of bytes */
  if (device->memory == NULL || device->memory->adam == NULL) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "optimizer: device %s works in host memory, where a step needs no buckets; leave them out",
                       device->name);
  }
  SLUICE_TRY(SLUICE_REQUIRE(bucket >= 1 && bucket <= most,
                            "optimizer: buckets of %lld elements on a device; give 1 to 2^40", (long long)bucket));
  return SLUICE_REQUIRE(num_slots >= 1 && num_slots <= SLUICE_BUCKET_MAX_SLOTS,
                        "optimizer: %d slots for buckets on a device; give 1, or 2 for copies during updates",
                        num_slots);
}

static void free_slots(sluice_device_buckets_t* buckets) {
  if (buckets->slots != NULL) sluice_free(buckets->memory, buckets->slots, buckets->bytes);
  buckets->slots = NULL;
}

static sluice_status_t take_slots(sluice_device_buckets_t* buckets, uint64_t bytes) {
  if (buckets->slots != NULL && bytes <= buckets->bytes) return SLUICE_OK;
  free_slots(buckets); /* waits for steps that still run */
  buckets->slots = sluice_alloc(buckets->memory, bytes, "optimizer: buckets on the device");
  buckets->bytes = bytes;
  return buckets->slots != NULL ? SLUICE_OK : sluice_alloc_status();
}

sluice_status_t sluice_device_buckets_create(sluice_device_t* device, sluice_allocator_t* memory,
                                             sluice_allocator_t* allocator, int64_t bucket, int32_t num_slots,
                                             sluice_device_buckets_t** out_buckets) {
  *out_buckets = NULL;
  SLUICE_TRY(check_form(device, bucket, num_slots));
  sluice_device_buckets_t* buckets = sluice_alloc_zeroed(allocator, sizeof *buckets, "optimizer: buckets");
  if (buckets == NULL) return sluice_alloc_status();
  *buckets = (sluice_device_buckets_t){device, memory, allocator, bucket, num_slots, NULL, 0};
  const sluice_status_t status = take_slots(buckets, sluice_device_buckets_bytes(bucket, num_slots));
  if (status != SLUICE_OK) {
    sluice_device_buckets_destroy(buckets);
    return status;
  }
  *out_buckets = buckets;
  return SLUICE_OK;
}

void sluice_device_buckets_destroy(sluice_device_buckets_t* buckets) {
  if (buckets == NULL) return;
  free_slots(buckets);
  sluice_free(buckets->allocator, buckets, sizeof *buckets);
}

/* ---- plans ---- */

/* With several ranks, sums overlap with updates. */
static sluice_bucket_form_t form_of(const sluice_device_buckets_t* buckets, const sluice_bucketed_step_t* step,
                                    const sluice_lines_t* lines) {
  const int sums = step->comm != NULL;
  return (sluice_bucket_form_t){.counts = lines->counts,
                                .num_lines = lines->num_lines,
                                .num_slots = buckets->num_slots,
                                .bucket = buckets->bucket,
                                .chunk = sums ? step->chunk : 1,
                                .num_grad_slots = sums ? SLUICE_BUCKET_MAX_SLOTS : buckets->num_slots,
                                .sums = sums};
}

/* Returns the bytes to receive for the longest chunk of all lines. */
static uint64_t receive_bytes(const sluice_bucket_form_t* form, const sluice_lines_t* lines) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < lines->num_lines; ++i) {
    const sluice_comm_t* comm = lines->comms[i];
    if (comm == NULL || comm->world_size == 1) continue;
    const int64_t buckets = sluice_min(form->chunk, sluice_ceil_div(lines->counts[i], form->bucket));
    const int64_t longest = sluice_min(lines->counts[i], buckets * form->bucket);
    bytes = sluice_max_u64(bytes, sluice_device_sum_receive_bytes(longest, comm->world_size));
  }
  return bytes;
}

/* Counts the bytes of a plan with the receive buffer of its sums. */
static sluice_status_t count_bytes(const sluice_device_buckets_t* buckets, const sluice_bucket_form_t* form,
                                   const sluice_lines_t* lines, uint64_t* out_bytes) {
  sluice_bucket_plan_t* plan = NULL;
  SLUICE_TRY(sluice_bucket_plan_create(form, buckets->allocator, &plan));
  *out_bytes = sluice_bucket_plan_bytes(plan) + receive_bytes(form, lines);
  sluice_bucket_plan_destroy(plan, buckets->allocator);
  return SLUICE_OK;
}

/* The plan that scans sums has no states, but its gradients are stored at the same place as those of the step. */
static sluice_status_t run(const sluice_device_buckets_t* buckets, job_t* job, const sluice_bucket_form_t* form,
                           const sluice_bucket_mode_t* mode, sluice_stream_t stream) {
  const uint64_t states = sluice_bucket_state_bytes(buckets->bucket, buckets->num_slots);
  char* memory = (char*)buckets->slots + (form->num_slots == 0 ? states : 0);
  sluice_bucket_plan_t* plan = NULL;
  SLUICE_TRY(sluice_bucket_plan_create(form, buckets->allocator, &plan));
  job->receive = (char*)buckets->slots + states + (uint64_t)plan->grad_elements * sizeof(float);
  const sluice_status_t status = sluice_bucket_run(buckets->device, plan, memory, mode, job, stream);
  sluice_bucket_plan_destroy(plan, buckets->allocator);
  return status;
}

/* ---- scanning gradients ---- */

/* The flags use memory of the first bucket's states, so they need no extra memory. */
static sluice_status_t clear_flags(const sluice_device_buckets_t* buckets, sluice_stream_t stream) {
  return buckets->device->memory->fill(buckets->device, stream, buckets->slots, 0,
                                       SLUICE_ADAM_NUM_FLAGS * sizeof(int32_t));
}

/* Blocks the host. *out_largest: infinity; `limit` if a gradient is above it; else 0. */
static sluice_status_t read_flags(const sluice_device_buckets_t* buckets, sluice_stream_t stream, float limit,
                                  float* out_largest) {
  int32_t flags[SLUICE_ADAM_NUM_FLAGS] = {0};
  SLUICE_TRY(buckets->device->memory->read(buckets->device, stream, buckets->slots, flags, sizeof flags));
  *out_largest = flags[SLUICE_ADAM_IS_LARGE] ? limit : 0.0F;
  if (flags[SLUICE_ADAM_IS_NOT_FINITE]) *out_largest = INFINITY;
  return SLUICE_OK;
}

static sluice_status_t look(const sluice_device_buckets_t* buckets, const sluice_lines_t* lines, sluice_stream_t stream,
                            float limit, float* out_largest) {
  SLUICE_TRY(clear_flags(buckets, stream));
  for (int64_t i = 0; i < lines->num_tensors; ++i) {
    const sluice_adam_tensor_t* t = lines->tensors[i].tensor;
    SLUICE_TRY(buckets->device->memory->adam->look(buckets->device, stream, t->grad, t->grad_dtype, t->count, limit,
                                                   buckets->slots));
  }
  return read_flags(buckets, stream, limit, out_largest);
}

/* Forms and scans all sums, without updates. */
static sluice_status_t look_at_sums(const sluice_device_buckets_t* buckets, const sluice_bucketed_step_t* step,
                                    job_t* job, sluice_stream_t stream, int32_t* out_is_bad) {
  sluice_bucket_form_t form = form_of(buckets, step, job->lines);
  form.num_slots = 0;
  SLUICE_TRY(clear_flags(buckets, stream));
  SLUICE_TRY(run(buckets, job, &form, &look_mode, stream));
  sluice_found_t mine = {.squares = 0.0}, all;
  SLUICE_TRY(read_flags(buckets, stream, FLT_MAX, &mine.largest));
  SLUICE_TRY(sluice_handshake_on_sums(step->comm, &mine, &all));
  *out_is_bad = !(all.largest < INFINITY);
  return SLUICE_OK;
}

/* ---- steps that a device does not support ---- */

static sluice_status_t check_array(sluice_device_t* device, const void* data, int32_t dtype, int64_t count,
                                   const char* array, int64_t group, int64_t tensor) {
  char name[96];
  const uint64_t width = sluice_dtype_bytes(dtype);
  (void)snprintf(name, sizeof name, "optimizer: tensor %lld of group %lld: %s", (long long)tensor, (long long)group,
                 array);
  return device->memory->check_memory(device, data, (uint64_t)count * width, width, name);
}

static sluice_status_t check_tensor(sluice_device_t* device, const sluice_adam_tensor_t* t, int64_t group,
                                    int64_t index) {
  SLUICE_TRY(SLUICE_REQUIRE(t->count == 0 || t->master != NULL,
                            "optimizer: tensor %lld of group %lld: master is NULL; a step on a device updates masters "
                            "in host memory, so pass one",
                            (long long)index, (long long)group));
  SLUICE_TRY(check_array(device, t->param, t->param_dtype, t->count, "param", group, index));
  return check_array(device, t->grad, t->grad_dtype, t->count, "grad", group, index);
}

static sluice_status_t check_comm(const sluice_comm_t* comm) {
  if (comm == NULL || comm->world_size == 1 || comm->vtable->exchange_enqueue != NULL) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                     "optimizer: a %s communicator moves host memory only; a step on a device needs an nccl "
                     "communicator, or a local one if ranks are threads",
                     comm->name);
}

static sluice_status_t check_modes(const sluice_bucketed_step_t* step) {
  if (step->adam.max_norm > 0.0) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "optimizer: max_norm is %g, but a step on a device does not compute the norm of gradients; clip "
                       "them before the step, or multiply loss_scale by the factor that clipping would divide by",
                       step->adam.max_norm);
  }
  SLUICE_TRY(check_comm(step->comm));
  for (int64_t g = 0; step->comm != NULL && g < step->adam.num_groups; ++g) SLUICE_TRY(check_comm(step->comms[g]));
  return SLUICE_OK;
}

/* Errors: INVALID_ARGUMENT naming group and tensor, UNSUPPORTED naming the setting. */
static sluice_status_t check_step(sluice_device_t* device, const sluice_bucketed_step_t* step) {
  SLUICE_TRY(sluice_adam_check_step(&step->adam));
  SLUICE_TRY(check_modes(step));
  for (int64_t g = 0; g < step->adam.num_groups; ++g) {
    const sluice_adam_group_t* group = step->adam.groups + g;
    for (int64_t t = 0; t < group->num_tensors; ++t) SLUICE_TRY(check_tensor(device, group->tensors + t, g, t));
  }
  return SLUICE_OK;
}

/* ---- a step ---- */

/* Does everything that can fail on one rank alone, before other ranks wait for it. out_largest: as read_flags. */
static sluice_status_t prepare(sluice_device_buckets_t* buckets, const sluice_bucketed_step_t* step,
                               const sluice_lines_t* lines, sluice_stream_t stream, uint64_t* out_bytes,
                               float* out_largest) {
  int32_t is_captured = 0;
  SLUICE_TRY(buckets->device->memory->open(buckets->device, stream, &is_captured));
  if (is_captured) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "optimizer: the stream is being captured into a graph, but the arguments of a step change each "
                       "time: run it outside of the graph");
  }
  const sluice_bucket_form_t form = form_of(buckets, step, lines);
  SLUICE_TRY(count_bytes(buckets, &form, lines, out_bytes));
  SLUICE_TRY(take_slots(buckets, *out_bytes));
  if (!step->adam.looks_first) return SLUICE_OK;
  return look(buckets, lines, stream, sluice_largest_safe_gradient(lines), out_largest);
}

/* Runs the step after the ranks have agreed. */
static sluice_status_t take_step(const sluice_device_buckets_t* buckets, const sluice_bucketed_step_t* step,
                                 const sluice_lines_t* lines, sluice_stream_t stream,
                                 sluice_bucketed_outcome_t* outcome) {
  const sluice_bucket_form_t form = form_of(buckets, step, lines);
  job_t job = {buckets->device, lines, 1.0 / step->adam.loss_scale, NULL, buckets->slots};
  if (outcome->is_decided) SLUICE_TRY(look_at_sums(buckets, step, &job, stream, &outcome->adam.is_skipped));
  return outcome->adam.is_skipped ? SLUICE_OK : run(buckets, &job, &form, &step_mode, stream);
}

/* Aborts the step's communicators, in which other ranks wait for sums that this rank will not send. */
static void tell(const sluice_bucketed_step_t* step, const sluice_lines_t* lines) {
  if (step->comm == NULL) return;
  for (int32_t i = 0; i < lines->num_lines; ++i) sluice_comm_abort(lines->comms[i]);
  sluice_comm_abort(step->comm);
}

static sluice_status_t step_over(sluice_device_buckets_t* buckets, sluice_bucketed_step_t* step,
                                 const sluice_lines_t* lines, sluice_stream_t stream,
                                 sluice_bucketed_outcome_t* outcome) {
  sluice_agreed_t mine = {.proposal = step->chunk}, agreed;
  uint64_t bytes = 0;
  if (step->refused == SLUICE_OK) step->refused = prepare(buckets, step, lines, stream, &bytes, &mine.largest);
  SLUICE_TRY(sluice_step_handshake(step, lines, &mine, &agreed));
  outcome->adam.largest = agreed.largest;
  outcome->adam.is_skipped = !(agreed.largest < INFINITY);
  if (outcome->adam.is_skipped) return SLUICE_OK;
  if (step->comm != NULL) {
    outcome->is_decided = agreed.largest > 0.0F;
    outcome->chunk = step->chunk;
    outcome->staging_bytes = bytes - sluice_bucket_state_bytes(buckets->bucket, buckets->num_slots);
  }
  const sluice_status_t status = take_step(buckets, step, lines, stream, outcome);
  if (status != SLUICE_OK) tell(step, lines);
  return status;
}

sluice_status_t sluice_device_buckets_step(sluice_device_buckets_t* buckets, const sluice_bucketed_step_t* step,
                                           sluice_stream_t stream, sluice_bucketed_outcome_t* out_outcome) {
  sluice_bucketed_step_t checked = *step;
  sluice_lines_t lines = {.num_lines = 0};
  *out_outcome = (sluice_bucketed_outcome_t){.chunk = 0};
  checked.bucket = buckets->bucket;
  if (checked.chunk == 0) checked.chunk = DEFAULT_CHUNK;
  if (checked.refused == SLUICE_OK) checked.refused = check_step(buckets->device, step);
  if (checked.refused == SLUICE_OK) {
    checked.refused =
        sluice_lines_make(step->adam.groups, step->adam.num_groups, step->comms, buckets->allocator, &lines);
  }
  const sluice_status_t status = step_over(buckets, &checked, &lines, stream, out_outcome);
  if (lines.block != NULL) sluice_lines_free(&lines, buckets->allocator);
  return status;
}
