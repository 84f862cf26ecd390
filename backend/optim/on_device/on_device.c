// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/on_device/on_device.h"

#include <float.h>
#include <math.h>
#include <stdio.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/device/adam_kernels.h"
#include "backend/optim/bucketed/handshake.h"
#include "backend/optim/on_device/job.h"
#include "backend/optim/on_device/sum.h"

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
static sluice_status_t run(const sluice_device_buckets_t* buckets, sluice_device_job_t* job,
                           const sluice_bucket_form_t* form, const sluice_bucket_mode_t* mode, sluice_stream_t stream) {
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
                                    sluice_device_job_t* job, sluice_stream_t stream, int32_t* out_is_bad) {
  sluice_bucket_form_t form = form_of(buckets, step, job->lines);
  form.num_slots = 0;
  SLUICE_TRY(clear_flags(buckets, stream));
  SLUICE_TRY(run(buckets, job, &form, &sluice_device_look_mode, stream));
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
  sluice_device_job_t job = {buckets->device, lines, 1.0 / step->adam.loss_scale, NULL, buckets->slots};
  if (outcome->is_decided) SLUICE_TRY(look_at_sums(buckets, step, &job, stream, &outcome->adam.is_skipped));
  return outcome->adam.is_skipped ? SLUICE_OK : run(buckets, &job, &form, &sluice_device_step_mode, stream);
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
