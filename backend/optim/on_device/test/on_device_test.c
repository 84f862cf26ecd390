// SPDX-License-Identifier: Apache-2.0
/* Buckets on the fake CUDA device: steps have the host's bits, and events alone order copies and kernels. */

#include "backend/base/dtype.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/optim/buckets/plan.h"
#include "backend/optim/on_device/on_device.h"
#include "third_party/bazel/test.h"

/* Three tensors in two groups. Tensors end at no multiple of a bucket's size, except the last. */
enum { COUNT = 5003, STEPS = 3, TENSORS = 3, GROUPS = 2 };
static const int64_t firsts[TENSORS + 1] = {0, 701, 2504, COUNT};

static const sluice_adam_rule_t rules[GROUPS] = {{.lr = 1e-2,
                                                  .beta1 = 0.9,
                                                  .beta2 = 0.99,
                                                  .epsilon = 1e-8,
                                                  .weight_decay = 0.1,
                                                  .is_decoupled = 1,
                                                  .corrects_the_bias = 1},
                                                 {.lr = 3e-2, .beta1 = 0.8, .beta2 = 0.999, .epsilon = 1e-6}};

/* ---- a device with parameters on it ---- */

typedef struct rig_s {
  sluice_allocator_t allocator, memory;
  sluice_device_t* device;
  void* stream;
  int32_t dtype;
  void *grad, *param;                   /* device memory */
  float *master, *exp_avg, *exp_avg_sq; /* page-locked */
} rig_t;

/* A step over the arrays of the rig. */
typedef struct request_s {
  sluice_adam_tensor_t tensors[TENSORS];
  sluice_adam_group_t groups[GROUPS];
  sluice_bucketed_step_t step;
} request_t;

static void fill(uint64_t seed, float* out, double scale) {
  for (int64_t i = 0; i < COUNT; ++i) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    out[i] = (float)(((double)(seed >> 11) / 4503599627370496.0 - 1.0) * scale);
  }
}

static uint64_t bytes_of(const rig_t* rig) { return COUNT * sluice_dtype_bytes(rig->dtype); }

static void* pinned(rig_t* rig) {
  void* data = NULL;
  assert_int_equal(rig->device->memory->take(rig->device, rig->stream, NULL, 1, COUNT * 4, 0, &data), SLUICE_OK);
  return data;
}

static void put(const rig_t* rig, void* to, const float* from) {
  for (int64_t i = 0; i < COUNT; ++i) {
    if (rig->dtype == SLUICE_DTYPE_F32) ((float*)to)[i] = from[i];
    if (rig->dtype == SLUICE_DTYPE_BF16) ((uint16_t*)to)[i] = sluice_f32_to_bf16(from[i]);
    if (rig->dtype == SLUICE_DTYPE_F16) ((uint16_t*)to)[i] = sluice_f32_to_f16(from[i]);
  }
}

static void set_gradients(const rig_t* rig, int64_t step) {
  float values[COUNT];
  fill(100 + (uint64_t)step, values, 0.1);
  put(rig, rig->grad, values); /* the fake's memory is the host's */
}

static void open_rig(rig_t* rig, int32_t dtype) {
  sluice_fake_cuda_reset();
  *rig = (rig_t){.dtype = dtype};
  sluice_allocator_init(&rig->allocator, NULL, NULL, NULL);
  assert_int_equal(sluice_fake_cuda_device(&rig->allocator, &rig->device), SLUICE_OK);
  rig->stream = sluice_fake_cuda_open_stream(0);
  rig->device->memory->init_memory(rig->device, NULL, NULL, NULL, &rig->memory);
  rig->grad = sluice_alloc(&rig->memory, bytes_of(rig), "gradients");
  rig->param = sluice_alloc(&rig->memory, bytes_of(rig), "parameters");
  assert_non_null(rig->grad);
  assert_non_null(rig->param);
  rig->master = pinned(rig), rig->exp_avg = pinned(rig), rig->exp_avg_sq = pinned(rig);
  fill(1, rig->master, 1.0);
  memset(rig->exp_avg, 0, COUNT * 4);
  memset(rig->exp_avg_sq, 0, COUNT * 4);
  put(rig, rig->param, rig->master);
  sluice_fake_cuda_forget_accesses();
}

static void close_rig(rig_t* rig) {
  rig->device->memory->give(rig->device, 1, rig->master);
  rig->device->memory->give(rig->device, 1, rig->exp_avg);
  rig->device->memory->give(rig->device, 1, rig->exp_avg_sq);
  sluice_free(&rig->memory, rig->grad, bytes_of(rig));
  sluice_free(&rig->memory, rig->param, bytes_of(rig));
  sluice_allocator_deinit(&rig->memory);
  rig->device->vtable->destroy(rig->device);
  sluice_fake_cuda_close_stream(rig->stream);
  char left[200];
  assert_int_equal(sluice_fake_cuda_live(left, sizeof left), 0);
  assert_int_equal(rig->allocator.num_live, 0);
  sluice_allocator_deinit(&rig->allocator);
}

static sluice_device_buckets_t* buckets_of(rig_t* rig, int64_t bucket, int32_t slots) {
  sluice_device_buckets_t* buckets = NULL;
  assert_int_equal(sluice_device_buckets_create(rig->device, &rig->memory, &rig->allocator, bucket, slots, &buckets),
                   SLUICE_OK);
  return buckets;
}

/* Fills a request. param, master and moments: the rig's, or a copy in host memory. */
static void request_of(const rig_t* rig, int64_t number, void* param, float* master, float* exp_avg, float* exp_avg_sq,
                       request_t* out) {
  const int64_t width = (int64_t)sluice_dtype_bytes(rig->dtype);
  for (int t = 0; t < TENSORS; ++t) {
    const int64_t first = firsts[t];
    out->tensors[t] = (sluice_adam_tensor_t){.count = firsts[t + 1] - first,
                                             .step = number + t, /* step counts differ per tensor */
                                             .param = (char*)param + first * width,
                                             .master = master + first,
                                             .grad = (const char*)rig->grad + first * width,
                                             .exp_avg = exp_avg + first,
                                             .exp_avg_sq = exp_avg_sq + first,
                                             .param_dtype = rig->dtype,
                                             .grad_dtype = rig->dtype};
  }
  out->groups[0] = (sluice_adam_group_t){rules[0], out->tensors, 2};
  out->groups[1] = (sluice_adam_group_t){rules[1], out->tensors + 2, 1};
  out->step = (sluice_bucketed_step_t){
      .adam = {.groups = out->groups, .num_groups = GROUPS, .loss_scale = 3.0, .looks_first = 1}};
}

/* Runs a step and waits for the device. */
static void take_step(const rig_t* rig, sluice_device_buckets_t* buckets, int64_t number) {
  request_t request;
  sluice_bucketed_outcome_t outcome;
  unsigned char byte;
  request_of(rig, number, rig->param, rig->master, rig->exp_avg, rig->exp_avg_sq, &request);
  assert_int_equal(sluice_device_buckets_step(buckets, &request.step, rig->stream, &outcome), SLUICE_OK);
  assert_int_equal(outcome.adam.is_skipped, 0);
  assert_int_equal(rig->device->memory->read(rig->device, rig->stream, rig->param, &byte, 1), SLUICE_OK);
}

/* ---- numbers ---- */

typedef struct states_s {
  float master[COUNT], exp_avg[COUNT], exp_avg_sq[COUNT];
  char param[COUNT * 4];
} states_t;

static void keep(const rig_t* rig, states_t* out) {
  memcpy(out->master, rig->master, sizeof out->master);
  memcpy(out->exp_avg, rig->exp_avg, sizeof out->exp_avg);
  memcpy(out->exp_avg_sq, rig->exp_avg_sq, sizeof out->exp_avg_sq);
  memset(out->param, 0, sizeof out->param);
  memcpy(out->param, rig->param, bytes_of(rig));
}

/* The same step by the host's kernels. */
static void step_on_host(const rig_t* rig, states_t* states, int64_t number) {
  request_t request;
  request_of(rig, number, states->param, states->master, states->exp_avg, states->exp_avg_sq, &request);
  for (int g = 0; g < GROUPS; ++g) {
    for (int64_t t = 0; t < request.groups[g].num_tensors; ++t) {
      const sluice_adam_tensor_t* tensor = request.groups[g].tensors + t;
      const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&rules[g], tensor->step, 1.0 / 3.0);
      sluice_adam_dispatch()->update(tensor, 0, tensor->count, &numbers);
    }
  }
}

static states_t wanted, found; /* too large for a stack */

TEST(Steps_InBucketsOfAnySize_HaveTheBitsOfTheHost) {
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  const int64_t sizes[] = {129, 1000, 1024, COUNT, 2 * COUNT};
  for (size_t d = 0; d < 3; ++d) {
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s) {
      for (int32_t slots = 1; slots <= 2; ++slots) {
        rig_t rig;
        open_rig(&rig, dtypes[d]);
        keep(&rig, &wanted);
        sluice_device_buckets_t* buckets = buckets_of(&rig, sizes[s], slots);
        for (int64_t number = 1; number <= STEPS; ++number) {
          set_gradients(&rig, number);
          take_step(&rig, buckets, number);
          step_on_host(&rig, &wanted, number);
        }
        keep(&rig, &found);
        assert_memory_equal(&found, &wanted, sizeof found);
        char what[400];
        if (sluice_fake_cuda_hazards(what, sizeof what) != 0) fail_msg("%s", what);
        sluice_device_buckets_destroy(buckets);
        close_rig(&rig);
      }
    }
  }
}
