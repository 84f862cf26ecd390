// SPDX-License-Identifier: Apache-2.0
#include "capi/src/optimizer_groups.h"

#include <stdlib.h>

#include "backend/base/alloc.h"
#include "backend/base/dtype.h"
#include "backend/base/structs.h"

static int is_real(int32_t dtype) {
  return dtype == SLUICE_DTYPE_F32 || dtype == SLUICE_DTYPE_BF16 || dtype == SLUICE_DTYPE_F16;
}

/* Returns whether the tensors are those of a step, and so have gradients. */
static int is_of_step(int32_t wanted) { return wanted < SLUICE_TENSORS_TO_STORE; }

static const char* missing_array(const sluice_optimizer_tensor_t* t, int32_t wanted) {
  if (t->param == NULL && wanted != SLUICE_TENSORS_TO_LOAD) return "param";
  if (t->grad == NULL && is_of_step(wanted)) return "grad";
  if (wanted != SLUICE_TENSORS_WITH_STATES) return NULL;
  if (t->exp_avg == NULL) return "exp_avg";
  return t->exp_avg_sq == NULL ? "exp_avg_sq" : NULL;
}

static const char* surplus_array(const sluice_optimizer_tensor_t* t, int32_t wanted) {
  if (wanted != SLUICE_TENSORS_OF_A_FILE) return NULL;
  if (t->master != NULL) return "master";
  if (t->exp_avg != NULL) return "exp_avg";
  return t->exp_avg_sq != NULL ? "exp_avg_sq" : NULL;
}

#define MOST_ELEMENTS (INT64_C(1) << 48) /* of all tensors, so that sizes and offsets in bytes do not overflow */

static sluice_status_t check_tensor(const sluice_optimizer_tensor_t* t, int64_t before, int32_t wanted, int64_t group,
                                    int64_t index) {
  SLUICE_TRY(SLUICE_REQUIRE(t->count >= 0 && t->count <= MOST_ELEMENTS - before,
                            "optimizer: tensor %lld of group %lld has count %lld; give 0 to 2^48, over all tensors",
                            (long long)index, (long long)group, (long long)t->count));
  const char *missing = missing_array(t, wanted), *surplus = surplus_array(t, wanted);
  SLUICE_TRY(SLUICE_REQUIRE(t->count == 0 || missing == NULL, "optimizer: tensor %lld of group %lld: %s is NULL",
                            (long long)index, (long long)group, missing != NULL ? missing : ""));
  SLUICE_TRY(SLUICE_REQUIRE(
      surplus == NULL, "optimizer: tensor %lld of group %lld: %s is given, but the step's file holds it; give NULL",
      (long long)index, (long long)group, surplus != NULL ? surplus : ""));
  SLUICE_TRY(SLUICE_REQUIRE(is_real(t->param_dtype),
                            "optimizer: tensor %lld of group %lld: param_dtype is %s (%d); known are f32, bf16 and f16",
                            (long long)index, (long long)group, sluice_dtype_name(t->param_dtype), t->param_dtype));
  return SLUICE_REQUIRE(!is_of_step(wanted) || is_real(t->grad_dtype),
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

/* Reads a group into the group of the work with that index, whose tensors begin at `tensors`. */
static sluice_status_t read_group(const sluice_optimizer_group_t* given, int64_t index, sluice_comm_t* of_step,
                                  int32_t wanted, sluice_optimizer_work_t* work, sluice_adam_tensor_t* tensors) {
  SLUICE_READ_STRUCT(sluice_optimizer_group, g, given, sizeof g);
  SLUICE_TRY(SLUICE_REQUIRE(g.reserved == 0, "optimizer: group %lld: reserved is %d; set it to 0", (long long)index,
                            g.reserved));
  SLUICE_TRY(SLUICE_REQUIRE(
      g.comm == NULL || of_step != NULL || !is_of_step(wanted),
      "optimizer: group %lld has a communicator, but the step has none: give the step the communicator of all ranks",
      (long long)index));
  work->comms[index] = g.comm != NULL ? g.comm : of_step;
  for (int64_t t = 0; t < g.num_tensors; ++t) {
    SLUICE_TRY(check_tensor(g.tensors + t, work->num_elements, wanted, index, t));
    tensors[t] = tensor_of(g.tensors + t);
    work->num_elements += tensors[t].count;
  }
  work->groups[index] = (sluice_adam_group_t){
      .rule = {g.lr, g.beta1, g.beta2, g.epsilon, g.weight_decay, g.decoupled, g.bias_correction, g.maximize},
      .tensors = tensors,
      .num_tensors = g.num_tensors,
  };
  return SLUICE_OK;
}

/* Counts the tensors, using only members that every struct layout has. */
static sluice_status_t count_tensors(const sluice_optimizer_group_t* const* groups, int64_t num_groups,
                                     int64_t* out_count) {
  int64_t count = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const sluice_optimizer_group_t* group = groups[g];
    SLUICE_TRY(SLUICE_REQUIRE(group != NULL, "optimizer: group %lld is NULL", (long long)g));
    SLUICE_TRY(SLUICE_REQUIRE(group->num_tensors >= 0 && (group->num_tensors == 0 || group->tensors != NULL),
                              "optimizer: group %lld has num_tensors %lld and its array is %s", (long long)g,
                              (long long)group->num_tensors, group->tensors == NULL ? "NULL" : "given"));
    SLUICE_TRY(SLUICE_REQUIRE(group->num_tensors <= (INT64_C(1) << 40) - count,
                              "optimizer: group %lld has num_tensors %lld; give at most 2^40 in all", (long long)g,
                              (long long)group->num_tensors));
    count += group->num_tensors;
  }
  *out_count = count;
  return SLUICE_OK;
}

static sluice_status_t take(const sluice_optimizer_group_t* const* groups, int64_t num_groups,
                            sluice_optimizer_work_t* work) {
  int64_t tensors = 0;
  SLUICE_TRY(SLUICE_REQUIRE(num_groups >= 0 && num_groups < (1 << 30) && (num_groups == 0 || groups != NULL),
                            "optimizer: num_groups is %lld and groups is %s", (long long)num_groups,
                            groups == NULL ? "NULL" : "given"));
  SLUICE_TRY(count_tensors(groups, num_groups, &tensors));
  const uint64_t group_bytes = (uint64_t)num_groups * sizeof *work->groups;
  const uint64_t comm_bytes = (uint64_t)num_groups * sizeof(sluice_comm_t*);
  const uint64_t bytes = group_bytes + comm_bytes + (uint64_t)tensors * sizeof *work->tensors;
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "optimizer: the tensors of a step");
  if (block == NULL) return sluice_alloc_status();
  work->groups = (sluice_adam_group_t*)(void*)block;
  work->comms = (sluice_comm_t**)(void*)(block + group_bytes);
  work->tensors = (sluice_adam_tensor_t*)(void*)(block + group_bytes + comm_bytes);
  work->num_groups = num_groups;
  work->bytes = bytes;
  return SLUICE_OK;
}

/* ---- overlaps ---- */

/* An array that a step writes, and its tensor. */
typedef struct range_s {
  uintptr_t begin, end;
  int64_t group, index;
} range_t;

enum { MOST_ARRAYS = 4 }; /* per tensor */

static int compare_ranges(const void* a, const void* b) {
  const uintptr_t left = ((const range_t*)a)->begin, right = ((const range_t*)b)->begin;
  return (left > right) - (left < right);
}

static int64_t list_ranges(const sluice_optimizer_work_t* work, range_t* ranges) {
  int64_t count = 0;
  for (int64_t g = 0; g < work->num_groups; ++g) {
    for (int64_t t = 0; t < work->groups[g].num_tensors; ++t) {
      const sluice_adam_tensor_t* tensor = work->groups[g].tensors + t;
      const void* const arrays[MOST_ARRAYS] = {tensor->param, tensor->master, tensor->exp_avg, tensor->exp_avg_sq};
      for (int i = 0; i < MOST_ARRAYS && tensor->count > 0; ++i) {
        const uint64_t of_one = i == 0 ? sluice_dtype_bytes(tensor->param_dtype) : sizeof(float);
        const uintptr_t begin = (uintptr_t)arrays[i];
        if (begin != 0) ranges[count++] = (range_t){begin, begin + (uint64_t)tensor->count * of_one, g, t};
      }
    }
  }
  return count;
}

/* A tensor that is given twice would be updated twice. */
static sluice_status_t check_overlaps(const sluice_optimizer_work_t* work, int64_t num_tensors) {
  const uint64_t bytes = (uint64_t)num_tensors * MOST_ARRAYS * sizeof(range_t);
  if (num_tensors == 0) return SLUICE_OK;
  range_t* ranges = sluice_alloc(sluice_process_allocator(), bytes, "optimizer: the tensors of a step");
  if (ranges == NULL) return sluice_alloc_status();
  const int64_t count = list_ranges(work, ranges);
  qsort(ranges, (size_t)count, sizeof *ranges, compare_ranges);
  sluice_status_t status = SLUICE_OK;
  for (int64_t i = 1; i < count && status == SLUICE_OK; ++i) {
    const range_t *before = ranges + i - 1, *after = ranges + i;
    status = SLUICE_REQUIRE(before->end <= after->begin,
                            "optimizer: tensor %lld of group %lld and tensor %lld of group %lld share memory: it would "
                            "be updated twice; give each parameter once, and arrays of its own",
                            (long long)before->index, (long long)before->group, (long long)after->index,
                            (long long)after->group);
  }
  sluice_free(sluice_process_allocator(), ranges, bytes);
  return status;
}

sluice_status_t sluice_optimizer_work_make(const sluice_optimizer_group_t* const* groups, int64_t num_groups,
                                           sluice_comm_t* of_step, int32_t wanted, sluice_optimizer_work_t* out_work) {
  *out_work = (sluice_optimizer_work_t){.bytes = 0};
  SLUICE_TRY(take(groups, num_groups, out_work));
  sluice_adam_tensor_t* tensors = out_work->tensors;
  for (int64_t g = 0; g < num_groups; ++g) {
    SLUICE_TRY(read_group(groups[g], g, of_step, wanted, out_work, tensors));
    tensors += out_work->groups[g].num_tensors;
  }
  return check_overlaps(out_work, tensors - out_work->tensors);
}

int sluice_optimizer_work_has_params(const sluice_optimizer_work_t* work) {
  for (int64_t g = 0; g < work->num_groups; ++g) {
    for (int64_t t = 0; t < work->groups[g].num_tensors; ++t) {
      if (work->groups[g].tensors[t].count > 0 && work->groups[g].tensors[t].param == NULL) return 0;
    }
  }
  return 1;
}

void sluice_optimizer_work_free(sluice_optimizer_work_t* work) {
  if (work->groups != NULL) sluice_free(sluice_process_allocator(), work->groups, work->bytes);
  work->groups = NULL;
}
