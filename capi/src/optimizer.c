/* The offloaded optimizer behind its public calls. */
#include "sluice/optimizer.h"

#include <stdatomic.h>
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/check.h"
#include "backend/base/dtype.h"
#include "backend/base/structs.h"
#include "backend/optim/bucketed/bucketed.h"

enum { DEFAULT_BUCKET = 1 << 22 };

struct sluice_optimizer_s {
  sluice_threads_t threads;
  const sluice_adam_kernels_t* kernels;
  atomic_flag is_busy;
  /* Of steps over ranks, from the first one on. */
  sluice_device_t* device;
  sluice_bucketed_t* bucketed;
};

/* ---- structs ---- */

void sluice_optimizer_config_init(sluice_optimizer_config_t* out_config, size_t struct_size) {
  sluice_struct_init(out_config, struct_size, NULL, 0);
}

void sluice_optimizer_group_init(sluice_optimizer_group_t* out_group, size_t struct_size) {
  const sluice_optimizer_group_t defaults = {.lr = 1e-3,
                                             .beta1 = 0.9,
                                             .beta2 = 0.999,
                                             .epsilon = 1e-8,
                                             .weight_decay = 0.01,
                                             .decoupled = 1,
                                             .bias_correction = 1};
  sluice_struct_init(out_group, struct_size, &defaults, sizeof defaults);
}

void sluice_optimizer_step_args_init(sluice_optimizer_step_args_t* out_args, size_t struct_size) {
  const sluice_optimizer_step_args_t defaults = {.loss_scale = 1.0, .check_finite = 1, .bucket = DEFAULT_BUCKET};
  sluice_struct_init(out_args, struct_size, &defaults, sizeof defaults);
}

void sluice_optimizer_step_result_init(sluice_optimizer_step_result_t* out_result, size_t struct_size) {
  sluice_struct_init(out_result, struct_size, NULL, 0);
}

/* ---- life ---- */

sluice_status_t sluice_optimizer_create(const sluice_optimizer_config_t* config, sluice_optimizer_t** out_optimizer) {
  SLUICE_TRY(SLUICE_REQUIRE(out_optimizer != NULL, "sluice_optimizer_create: out_optimizer is NULL"));
  *out_optimizer = NULL;
  sluice_optimizer_config_t c;
  sluice_optimizer_config_init(&c, sizeof c);
  SLUICE_TRY(sluice_struct_copy(&c, sizeof c, config, sizeof c, "sluice_optimizer_config_t"));
  if (c.next != NULL) return SLUICE_FAIL(SLUICE_E_ABI, "sluice_optimizer_config_t: extension of unknown type");
  sluice_optimizer_t* optimizer = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *optimizer, "optimizer");
  if (optimizer == NULL) return sluice_alloc_status();
  optimizer->threads = sluice_threads_find();
  optimizer->kernels = sluice_adam_widest();
  atomic_flag_clear(&optimizer->is_busy);
  *out_optimizer = optimizer;
  return SLUICE_OK;
}

void sluice_optimizer_destroy(sluice_optimizer_t* optimizer) {
  if (optimizer == NULL) return;
  sluice_bucketed_destroy(optimizer->bucketed);
  if (optimizer->device != NULL) optimizer->device->vtable->destroy(optimizer->device);
  sluice_free(sluice_process_allocator(), optimizer, sizeof *optimizer);
}

/* ---- a step ---- */

/* The groups as the optimizer's room has them, their communicators and tensors, in one block. */
typedef struct work_s {
  sluice_adam_group_t* groups;
  sluice_comm_t** comms;
  sluice_adam_tensor_t* tensors;
  uint64_t bytes;
} work_t;

static int is_real(int32_t dtype) {
  return dtype == SLUICE_DTYPE_F32 || dtype == SLUICE_DTYPE_BF16 || dtype == SLUICE_DTYPE_F16;
}

static const char* missing_array(const sluice_optimizer_tensor_t* t) {
  if (t->param == NULL) return "param";
  if (t->grad == NULL) return "grad";
  if (t->exp_avg == NULL) return "exp_avg";
  return t->exp_avg_sq == NULL ? "exp_avg_sq" : NULL;
}

static sluice_status_t check_tensor(const sluice_optimizer_tensor_t* t, int64_t group, int64_t index) {
  SLUICE_TRY(SLUICE_REQUIRE(t->count >= 0, "optimizer: tensor %lld of group %lld has count %lld", (long long)index,
                            (long long)group, (long long)t->count));
  const char* missing = missing_array(t);
  SLUICE_TRY(SLUICE_REQUIRE(t->count == 0 || missing == NULL, "optimizer: tensor %lld of group %lld: %s is NULL",
                            (long long)index, (long long)group, missing != NULL ? missing : ""));
  SLUICE_TRY(SLUICE_REQUIRE(is_real(t->param_dtype),
                            "optimizer: tensor %lld of group %lld: param_dtype is %s (%d); known are f32, bf16 and f16",
                            (long long)index, (long long)group, sluice_dtype_name(t->param_dtype), t->param_dtype));
  return SLUICE_REQUIRE(is_real(t->grad_dtype),
                        "optimizer: tensor %lld of group %lld: grad_dtype is %s (%d); known are f32, bf16 and f16",
                        (long long)index, (long long)group, sluice_dtype_name(t->grad_dtype), t->grad_dtype);
}

static sluice_adam_tensor_t tensor_of(const sluice_optimizer_tensor_t* t) {
  return (sluice_adam_tensor_t){
      .count = t->count,
      .step = t->step,
      .param = t->param,
      .master = t->master,
      .grad = t->grad,
      .exp_avg = t->exp_avg,
      .exp_avg_sq = t->exp_avg_sq,
      .param_dtype = t->param_dtype,
      .grad_dtype = t->grad_dtype,
  };
}

static sluice_status_t read_group(const sluice_optimizer_group_t* given, int64_t index, sluice_comm_t* of_step,
                                  sluice_adam_group_t* out_group, sluice_comm_t** out_comm,
                                  sluice_adam_tensor_t* out_tensors) {
  sluice_optimizer_group_t g;
  sluice_optimizer_group_init(&g, sizeof g);
  SLUICE_TRY(sluice_struct_copy(&g, sizeof g, given, sizeof g, "sluice_optimizer_group_t"));
  SLUICE_TRY(SLUICE_REQUIRE(g.reserved == 0, "optimizer: group %lld: reserved is %d; set it to 0", (long long)index,
                            g.reserved));
  SLUICE_TRY(SLUICE_REQUIRE(g.comm == NULL || of_step != NULL,
                            "optimizer: group %lld has a communicator, and the step has none: give the step that of "
                            "all ranks",
                            (long long)index));
  *out_comm = g.comm != NULL ? g.comm : of_step;
  for (int64_t t = 0; t < g.num_tensors; ++t) {
    SLUICE_TRY(check_tensor(g.tensors + t, index, t));
    out_tensors[t] = tensor_of(g.tensors + t);
  }
  *out_group = (sluice_adam_group_t){
      .rule = {g.lr, g.beta1, g.beta2, g.epsilon, g.weight_decay, g.decoupled, g.bias_correction, g.maximize},
      .tensors = out_tensors,
      .num_tensors = g.num_tensors,
  };
  return SLUICE_OK;
}

/* How many tensors there are, by the part of each struct that is in every layout. */
static sluice_status_t count_tensors(const sluice_optimizer_step_args_t* args, int64_t* out_count) {
  int64_t count = 0;
  for (int64_t g = 0; g < args->num_groups; ++g) {
    const sluice_optimizer_group_t* group = args->groups[g];
    SLUICE_TRY(SLUICE_REQUIRE(group != NULL, "optimizer: group %lld is NULL", (long long)g));
    SLUICE_TRY(SLUICE_REQUIRE(group->num_tensors >= 0 && (group->num_tensors == 0 || group->tensors != NULL),
                              "optimizer: group %lld has num_tensors %lld and its array is %s", (long long)g,
                              (long long)group->num_tensors, group->tensors == NULL ? "NULL" : "given"));
    SLUICE_TRY(SLUICE_REQUIRE(group->num_tensors <= (INT64_C(1) << 40) - count,
                              "optimizer: group %lld has num_tensors %lld, which nobody can have", (long long)g,
                              (long long)group->num_tensors));
    count += group->num_tensors;
  }
  *out_count = count;
  return SLUICE_OK;
}

static sluice_status_t take_work(const sluice_optimizer_step_args_t* args, work_t* out_work) {
  int64_t tensors = 0;
  SLUICE_TRY(SLUICE_REQUIRE(
      args->num_groups >= 0 && args->num_groups < (1 << 30) && (args->num_groups == 0 || args->groups != NULL),
      "optimizer: num_groups is %lld and groups is %s", (long long)args->num_groups,
      args->groups == NULL ? "NULL" : "given"));
  SLUICE_TRY(count_tensors(args, &tensors));
  const uint64_t group_bytes = (uint64_t)args->num_groups * sizeof *out_work->groups;
  const uint64_t comm_bytes = (uint64_t)args->num_groups * sizeof(sluice_comm_t*);
  const uint64_t bytes = group_bytes + comm_bytes + (uint64_t)tensors * sizeof *out_work->tensors;
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "optimizer: the tensors of a step");
  if (block == NULL) return sluice_alloc_status();
  out_work->groups = (sluice_adam_group_t*)(void*)block;
  out_work->comms = (sluice_comm_t**)(void*)(block + group_bytes);
  out_work->tensors = (sluice_adam_tensor_t*)(void*)(block + group_bytes + comm_bytes);
  out_work->bytes = bytes;
  return SLUICE_OK;
}

static sluice_status_t read_groups(const sluice_optimizer_step_args_t* args, const work_t* work) {
  int64_t first = 0;
  for (int64_t g = 0; g < args->num_groups; ++g) {
    SLUICE_TRY(read_group(args->groups[g], g, args->comm, work->groups + g, work->comms + g, work->tensors + first));
    first += work->groups[g].num_tensors;
  }
  return SLUICE_OK;
}

/* One rank over all elements at once. */
static sluice_status_t step_alone(sluice_optimizer_t* optimizer, const sluice_bucketed_step_t* step,
                                  sluice_bucketed_outcome_t* out_outcome) {
  (void)optimizer;
  SLUICE_TRY(step->refused);
  return sluice_adam_step(&step->adam, &out_outcome->adam);
}

static sluice_status_t open_bucketed(sluice_optimizer_t* optimizer) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  if (optimizer->device == NULL) SLUICE_TRY(sluice_cpu_device_create(allocator, &optimizer->device));
  if (optimizer->bucketed != NULL) return SLUICE_OK;
  return sluice_bucketed_create(optimizer->device, allocator, &optimizer->bucketed);
}

/* A rank that is refused takes part in the handshake, so that the others are told. */
static sluice_status_t step_over_ranks(sluice_optimizer_t* optimizer, const sluice_bucketed_step_t* step,
                                       sluice_bucketed_outcome_t* out_outcome) {
  const sluice_status_t opened = open_bucketed(optimizer);
  if (opened != SLUICE_OK) sluice_comm_abort(step->comm);
  SLUICE_TRY(opened);
  return sluice_bucketed_step(optimizer->bucketed, step, out_outcome);
}

static sluice_status_t run_step(sluice_optimizer_t* optimizer, const sluice_optimizer_step_args_t* args,
                                sluice_bucketed_outcome_t* out_outcome) {
  work_t work = {.bytes = 0};
  sluice_status_t refused =
      SLUICE_REQUIRE(args->reserved == 0, "optimizer: reserved is %d; set it to 0", args->reserved);
  if (refused == SLUICE_OK) {
    refused = SLUICE_REQUIRE(args->sum_buckets >= 0, "optimizer: sum_buckets is %lld; give k, or 0 to have it chosen",
                             (long long)args->sum_buckets);
  }
  if (refused == SLUICE_OK) refused = take_work(args, &work);
  if (refused == SLUICE_OK) refused = read_groups(args, &work);
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
      .bucket = args->bucket,
      .chunk = args->sum_buckets,
      .refused = refused,
  };
  const sluice_status_t status = (args->comm != NULL ? step_over_ranks : step_alone)(optimizer, &step, out_outcome);
  if (work.groups != NULL) sluice_free(sluice_process_allocator(), work.groups, work.bytes);
  return status;
}

sluice_status_t sluice_optimizer_step(sluice_optimizer_t* optimizer, const sluice_optimizer_step_args_t* args,
                                      sluice_optimizer_step_result_t* out_result) {
  SLUICE_TRY(SLUICE_REQUIRE(optimizer != NULL, "sluice_optimizer_step: optimizer is NULL"));
  sluice_optimizer_step_args_t a;
  sluice_optimizer_step_args_init(&a, sizeof a);
  SLUICE_TRY(sluice_struct_copy(&a, sizeof a, args, sizeof a, "sluice_optimizer_step_args_t"));
  if (out_result != NULL) SLUICE_TRY(sluice_struct_check_size(out_result, "sluice_optimizer_step_result_t"));
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
  };
  sluice_struct_give(out_result, &result, sizeof result);
  return SLUICE_OK;
}
