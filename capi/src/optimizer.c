// SPDX-License-Identifier: Apache-2.0
/* The public calls of the offloaded optimizer. */
#include "sluice/optimizer.h"

#include <stdatomic.h>
#include <unistd.h>

#include "backend/base/alloc.h"
#include "backend/base/structs.h"
#include "backend/moe/context/context.h"
#include "backend/optim/bucketed/bucketed.h"
#include "backend/optim/on_device/on_device.h"
#include "capi/src/optimizer_groups.h"

enum { DEFAULT_BUCKET = 1 << 22 };

struct sluice_optimizer_s {
  sluice_threads_t threads;
  const sluice_adam_kernels_t* kernels;
  pid_t pid; /* of the creator: a forked child has none of its threads */
  atomic_flag is_busy;
  /* For steps on a device. NULL: steps run in host memory. */
  sluice_context_t* context; /* retained */
  sluice_device_buckets_t* device_buckets;
  /* For steps over ranks, from the first one on. */
  sluice_device_t* device;
  sluice_bucketed_t* bucketed;
};

/* ---- structs ---- */

SLUICE_DEFINE_INIT(sluice_optimizer_config, .device_bucket = DEFAULT_BUCKET, .device_num_slots = 2)
SLUICE_DEFINE_INIT(sluice_optimizer_group, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8,
                   .weight_decay = 0.01, .decoupled = 1, .bias_correction = 1)
SLUICE_DEFINE_INIT(sluice_optimizer_step_args, .loss_scale = 1.0, .check_finite = 1, .bucket = DEFAULT_BUCKET)
SLUICE_DEFINE_INIT(sluice_optimizer_step_result, 0)

/* ---- create and destroy ---- */

static sluice_status_t open_on_device(sluice_optimizer_t* optimizer, const sluice_optimizer_config_t* config) {
  sluice_context_t* context = config->context;
  SLUICE_TRY(sluice_engine_enter(context, "sluice_optimizer_create"));
  const sluice_status_t status =
      sluice_device_buckets_create(context->device, context->memory, sluice_process_allocator(), config->device_bucket,
                                   config->device_num_slots, &optimizer->device_buckets);
  sluice_engine_leave(context);
  if (status != SLUICE_OK) return status;
  sluice_engine_retain(context);
  optimizer->context = context;
  return SLUICE_OK;
}

static void close_on_device(sluice_optimizer_t* optimizer) {
  if (optimizer->context == NULL) return;
  /* A forked child leaves device memory to its parent. */
  if (optimizer->context->pid == getpid()) sluice_device_buckets_destroy(optimizer->device_buckets);
  sluice_engine_release(optimizer->context);
}

sluice_status_t sluice_optimizer_create(const sluice_optimizer_config_t* config, sluice_optimizer_t** out_optimizer) {
  SLUICE_TRY(SLUICE_REQUIRE(out_optimizer != NULL, "sluice_optimizer_create: out_optimizer is NULL"));
  *out_optimizer = NULL;
  SLUICE_READ_EXTENSIBLE(sluice_optimizer_config, c, config, sizeof c);
  SLUICE_TRY(SLUICE_REQUIRE(c.arithmetic == SLUICE_OPTIMIZER_EXACT || c.arithmetic == SLUICE_OPTIMIZER_ROUNDED,
                            "optimizer: arithmetic is %d; give SLUICE_OPTIMIZER_EXACT or SLUICE_OPTIMIZER_ROUNDED",
                            c.arithmetic));
  if (c.context != NULL && c.arithmetic != SLUICE_OPTIMIZER_EXACT) {
    return SLUICE_FAIL(
        SLUICE_E_UNSUPPORTED,
        "optimizer: arithmetic is SLUICE_OPTIMIZER_ROUNDED with a context; updates on a device are exact");
  }
  sluice_optimizer_t* optimizer = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *optimizer, "optimizer");
  if (optimizer == NULL) return sluice_alloc_status();
  optimizer->threads = sluice_threads_find();
  optimizer->kernels = sluice_adam_dispatch() + c.arithmetic; /* indexed by sluice_adam_arithmetic_t */
  optimizer->pid = getpid();
  atomic_flag_clear(&optimizer->is_busy);
  const sluice_status_t status = c.context != NULL ? open_on_device(optimizer, &c) : SLUICE_OK;
  if (status != SLUICE_OK) {
    sluice_optimizer_destroy(optimizer);
    return status;
  }
  *out_optimizer = optimizer;
  return SLUICE_OK;
}

void sluice_optimizer_destroy(sluice_optimizer_t* optimizer) {
  if (optimizer == NULL) return;
  close_on_device(optimizer);
  sluice_bucketed_destroy(optimizer->bucketed);
  /* In a forked child its threads do not exist, and joining them would hang. */
  if (optimizer->device != NULL && optimizer->pid == getpid()) optimizer->device->vtable->destroy(optimizer->device);
  sluice_free(sluice_process_allocator(), optimizer, sizeof *optimizer);
}

/* ---- a step ---- */

/* An implementation of a step. stream: NULL in host memory. */
typedef sluice_status_t (*step_fn_t)(sluice_optimizer_t* optimizer, const sluice_bucketed_step_t* step,
                                     sluice_stream_t stream, sluice_bucketed_outcome_t* out_outcome);

/* With one rank: all elements at once. */
static sluice_status_t step_alone(sluice_optimizer_t* optimizer, const sluice_bucketed_step_t* step,
                                  sluice_stream_t stream, sluice_bucketed_outcome_t* out_outcome) {
  (void)optimizer;
  (void)stream;
  SLUICE_TRY(step->refused);
  return sluice_adam_step(&step->adam, &out_outcome->adam);
}

static sluice_status_t open_bucketed(sluice_optimizer_t* optimizer) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  if (optimizer->device == NULL) SLUICE_TRY(sluice_cpu_device_create(allocator, &optimizer->device));
  if (optimizer->bucketed != NULL) return SLUICE_OK;
  return sluice_bucketed_create(optimizer->device, allocator, &optimizer->bucketed);
}

/* With several ranks or a file. A rank that is refused still takes part in the handshake, which tells the others. */
static sluice_status_t step_in_buckets(sluice_optimizer_t* optimizer, const sluice_bucketed_step_t* step,
                                       sluice_stream_t stream, sluice_bucketed_outcome_t* out_outcome) {
  (void)stream;
  const sluice_status_t opened = open_bucketed(optimizer);
  if (opened != SLUICE_OK) sluice_comm_abort(step->comm);
  SLUICE_TRY(opened);
  return sluice_bucketed_step(optimizer->bucketed, step, out_outcome);
}

static sluice_status_t step_on_device(sluice_optimizer_t* optimizer, const sluice_bucketed_step_t* step,
                                      sluice_stream_t stream, sluice_bucketed_outcome_t* out_outcome) {
  SLUICE_TRY(sluice_engine_enter(optimizer->context, "sluice_optimizer_step"));
  const sluice_status_t status = sluice_device_buckets_step(optimizer->device_buckets, step, stream, out_outcome);
  sluice_engine_leave(optimizer->context);
  return status;
}

static step_fn_t way_of(const sluice_optimizer_t* optimizer, const sluice_optimizer_step_args_t* args) {
  if (optimizer->context != NULL) return step_on_device;
  return args->comm != NULL || args->file != NULL ? step_in_buckets : step_alone;
}

static sluice_status_t check_args(const sluice_optimizer_t* optimizer, const sluice_optimizer_step_args_t* args) {
  SLUICE_TRY(SLUICE_REQUIRE(args->reserved == 0, "optimizer: reserved is %d; set it to 0", args->reserved));
  if (optimizer->context != NULL && args->file != NULL) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "optimizer: file is set, which a step on a device does not support; pass NULL, and states in "
                       "host memory with the tensors");
  }
  SLUICE_TRY(SLUICE_REQUIRE(optimizer->context != NULL || args->stream == NULL,
                            "optimizer: a stream is given, and the optimizer was made without a context: its steps "
                            "run in host memory; give NULL"));
  return SLUICE_REQUIRE(args->sum_buckets >= 0, "optimizer: sum_buckets is %lld; give k, or 0 to have it chosen",
                        (long long)args->sum_buckets);
}

static sluice_status_t read_args(const sluice_optimizer_t* optimizer, const sluice_optimizer_step_args_t* args,
                                 sluice_optimizer_work_t* work, sluice_state_file_t** out_states) {
  const int32_t wanted = args->file != NULL ? SLUICE_TENSORS_OF_A_FILE : SLUICE_TENSORS_WITH_STATES;
  SLUICE_TRY(check_args(optimizer, args));
  SLUICE_TRY(sluice_optimizer_work_make(args->groups, args->num_groups, args->comm, wanted, work));
  if (args->file == NULL) return SLUICE_OK;
  SLUICE_TRY(sluice_optimizer_file_take(args->file, out_states));
  return sluice_optimizer_file_check_step(*out_states, work);
}

static sluice_status_t run_step(sluice_optimizer_t* optimizer, const sluice_optimizer_step_args_t* args,
                                sluice_bucketed_outcome_t* out_outcome) {
  sluice_optimizer_work_t work = {.bytes = 0};
  sluice_state_file_t* states = NULL;
  const sluice_status_t refused = read_args(optimizer, args, &work, &states);
  const sluice_bucketed_step_t step = {
      .adam = {.groups = work.groups,
               .num_groups = args->num_groups,
               .loss_scale = args->loss_scale,
               .max_norm = args->max_norm,
               .looks_first = args->check_finite,
               .kernels = optimizer->kernels,
               .threads = &optimizer->threads},
      .comm = args->comm,
      .comms = work.comms,
      .file = states,
      .bucket = args->bucket,
      .chunk = args->sum_buckets,
      .refused = refused,
  };
  const sluice_status_t status = way_of(optimizer, args)(optimizer, &step, args->stream, out_outcome);
  if (states != NULL) sluice_optimizer_file_release(args->file);
  sluice_optimizer_work_free(&work);
  return status;
}

sluice_status_t sluice_optimizer_step(sluice_optimizer_t* optimizer, const sluice_optimizer_step_args_t* args,
                                      sluice_optimizer_step_result_t* out_result) {
  SLUICE_TRY(SLUICE_REQUIRE(optimizer != NULL, "sluice_optimizer_step: optimizer is NULL"));
  SLUICE_READ_STRUCT(sluice_optimizer_step_args, a, args, sizeof a);
  if (out_result != NULL) SLUICE_TRY(sluice_struct_check_size(out_result, "sluice_optimizer_step_result_t"));
  if (optimizer->pid != getpid()) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "sluice_optimizer_step: this optimizer was made before fork(); make a new one in the child");
  }
  if (atomic_flag_test_and_set(&optimizer->is_busy)) {
    return SLUICE_FAIL(SLUICE_E_BUSY, "sluice_optimizer_step: another thread is in a step of this optimizer");
  }
  sluice_bucketed_outcome_t outcome = {.chunk = 0};
  const sluice_status_t status = run_step(optimizer, &a, &outcome);
  atomic_flag_clear(&optimizer->is_busy);
  if (status != SLUICE_OK || out_result == NULL) return status;
  const sluice_optimizer_step_result_t result = {
      .struct_size = out_result->struct_size,
      .norm = outcome.adam.norm,
      .skipped = outcome.adam.is_skipped,
      .decided = outcome.is_decided,
      .sum_buckets = outcome.chunk,
      .staging_bytes = outcome.staging_bytes,
      .sum_ns = outcome.sum_ns,
      .update_ns = outcome.update_ns,
      .step_ns = outcome.step_ns,
      .read_ns = outcome.copy_in_ns,
      .write_ns = outcome.copy_out_ns,
  };
  sluice_struct_give(out_result, &result, sizeof result);
  return SLUICE_OK;
}
