// SPDX-License-Identifier: Apache-2.0
/* The optimizer on a fake CUDA device through its public calls: the bits of a step in host memory, exact bytes, steps
 * that run completely or not at all, errors, and the failure of each driver call. */

#include "backend/base/dtype.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/cuda_optimizer_model.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { STEPS = 3 };

static com_model_t* fill_model(sluice_context_t* context) {
  return com_model_fill(context, 0, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16);
}

static com_model_t* open_model(sluice_context_t* context) {
  com_model_t* m = fill_model(context);
  const sluice_optimizer_config_t config = com_config_of(context);
  WORKS(sluice_optimizer_create(&config, &m->optimizer));
  return m;
}

static void expect_equal(const com_model_t* a, const com_model_t* b) {
  const char* what = com_difference(a, b);
  if (what != NULL) fail_msg("%s differs", what);
}

/* A layer on the device. Its passes run between steps, since the optimizer uses the same context. */
static void open_rig(rig_t* rig) {
  const sluice_moe_config_t config = rig_config();
  open_all(rig, &config);
}

static void close_rig(rig_t* rig) { assert_int_equal(close_all(rig), 0); }

/* ---- numbers ---- */

/* The last step is taken after the layer and the context are closed: the context outlives its handle. */
TEST(Steps_OnADevice_HaveTheBitsOfThoseInHostMemory) {
  rig_t rig;
  uint64_t digest;
  open_rig(&rig);
  com_model_t *device = open_model(rig.context), *host = open_model(NULL);
  for (int64_t t = 1; t <= STEPS; ++t) {
    com_set_gradients(device, t), com_set_gradients(host, t);
    if (t < STEPS) WORKS(rig_round(&rig, &digest));
    if (t == STEPS) rig_close(&rig);
    WORKS(com_step(device));
    WORKS(com_step(host));
    assert_int_equal(device->result.skipped + host->result.skipped, 0);
    expect_equal(device, host);
    com_advance(device), com_advance(host);
  }
  com_model_free(device), com_model_free(host);
  fakes_must_be_clean();
  rig_use_machine(NULL, 0);
}

static com_model_t* open_sized(sluice_context_t* context, int32_t dtype, int64_t bucket, int32_t slots) {
  com_model_t* m = com_model_fill(context, 0, dtype, dtype);
  sluice_optimizer_config_t config = com_config_of(context);
  config.device_bucket = bucket, config.device_num_slots = slots;
  WORKS(sluice_optimizer_create(&config, &m->optimizer));
  m->tensors[1].step += 2; /* step counts differ per tensor */
  return m;
}

/* Tensors end at no multiple of a bucket's size, and events alone order copies and kernels. */
TEST(Steps_InBucketsOfAnySize_HaveTheBitsOfThoseInHostMemory) {
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  const int64_t sizes[] = {129, 1000, 1024, COM_ELEMENTS, 2 * COM_ELEMENTS};
  for (int i = 0; i < 3 * 5 * 2; ++i) {
    rig_t rig;
    open_rig(&rig);
    com_model_t* device = open_sized(rig.context, dtypes[i % 3], sizes[i / 3 % 5], 1 + i / 15);
    com_model_t* host = open_sized(NULL, dtypes[i % 3], COM_BUCKET, 2);
    for (int64_t t = 1; t <= STEPS; ++t) {
      com_set_gradients(device, t), com_set_gradients(host, t);
      WORKS(com_step(device));
      WORKS(com_step(host));
      expect_equal(device, host);
      com_advance(device), com_advance(host);
    }
    com_model_free(device), com_model_free(host);
    close_rig(&rig);
  }
}

/* ---- bytes ---- */

TEST(Device_HoldsWhatIsPredictedToTheByte) {
  rig_t rig;
  for (int32_t slots = 1; slots <= 2; ++slots) {
    open_rig(&rig);
    const uint64_t before = own_rig_stats(&rig).current_bytes;
    com_model_t* m = fill_model(rig.context);
    sluice_optimizer_config_t config = com_config_of(rig.context);
    config.device_num_slots = slots;
    WORKS(sluice_optimizer_create(&config, &m->optimizer));
    WORKS(com_step(m));
    DEFAULTS(sluice_optimizer_workload, workload);
    workload.count = COM_ELEMENTS, workload.bucket = COM_BUCKET, workload.num_slots = slots, workload.sum_buckets = 1;
    DEFAULTS(sluice_optimizer_prediction, predicted);
    WORKS(sluice_optimizer_predict(&workload, &predicted));
    const uint64_t taken = own_rig_stats(&rig).current_bytes - before;
    assert_int_equal(taken, 16 * COM_BUCKET * (uint64_t)slots);
    assert_int_equal(4 * COM_ELEMENTS + taken, predicted.near_bytes); /* 4 phi + 16 bucket, for each slot */
    com_model_free(m);
    assert_int_equal(own_rig_stats(&rig).current_bytes, before);
    close_rig(&rig);
  }
}

/* ---- errors ---- */

TEST(Config_ThatCannotBe_IsRefusedByName) {
  rig_t rig;
  open_rig(&rig);
  sluice_optimizer_t* optimizer = NULL;
  sluice_optimizer_config_t config;
#define REFUSES(change, status, text)          \
  config = com_config_of(rig.context), change; \
  REFUSED(sluice_optimizer_create(&config, &optimizer), status, text)
  REFUSES(config.device_bucket = 0, BAD, "buckets of 0");
  REFUSES(config.device_bucket = -1, BAD, "buckets of -1");
  REFUSES(config.device_bucket = INT64_MAX, BAD, "buckets of 9223372036854775807");
  REFUSES(config.device_num_slots = 0, BAD, "slots");
  REFUSES(config.device_num_slots = 3, BAD, "slots");
  REFUSES(config.arithmetic = SLUICE_OPTIMIZER_ROUNDED, SLUICE_E_UNSUPPORTED, "updates on a device are exact");
  REFUSES(sluice_fake_cuda_refuse(0), SLUICE_E_NO_MEMORY, "buckets on the device");
#undef REFUSES
  assert_null(optimizer);
  close_rig(&rig);

  sluice_context_t* on_cpu = NULL;
  DEFAULTS(sluice_context_config, cpu);
  cpu.gemm = "ref";
  WORKS(sluice_context_create(&cpu, NULL, &on_cpu));
  config = com_config_of(on_cpu);
  REFUSED(sluice_optimizer_create(&config, &optimizer), SLUICE_E_UNSUPPORTED, "host memory");
  assert_null(optimizer);
  sluice_context_destroy(on_cpu);
}

TEST(Step_OnADevice_RefusesByNameWhatItDoesNotDo) {
  rig_t rig;
  open_rig(&rig);
  com_model_t *m = open_model(rig.context), *untouched = fill_model(NULL);
  const com_model_t good = *m;
#define REFUSES(field, value, status, text) \
  m->field = (value);                       \
  REFUSED(com_step(m), status, text);       \
  m->field = good.field
  REFUSES(args.max_norm, 1.0, SLUICE_E_UNSUPPORTED, "max_norm");
  /* A file is rejected before it is dereferenced. */
  REFUSES(args.file, (sluice_optimizer_file_t*)(uintptr_t)8, SLUICE_E_UNSUPPORTED, "file");
  REFUSES(tensors[1].grad, m->master, BAD, "tensor 0 of group 1: grad");
  REFUSES(tensors[0].master, NULL, BAD, "tensor 0 of group 0: master");
  REFUSES(tensors[0].param, untouched->param, BAD, "tensor 0 of group 0: param");
  REFUSES(tensors[0].step, 0, BAD, "tensor 0 of group 0 is at step 0");
#undef REFUSES
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_STATE, "captured");
  sluice_fake_graph_t* graph = NULL;
  (void)sluice_fake_cuda_end_capture(fakes_stream(0), &graph);
  sluice_fake_cuda_destroy_graph(graph);
  expect_equal(m, untouched);
  WORKS(com_step(m)); /* and the next one works */
  com_model_t* host = open_model(NULL);
  host->args.stream = (sluice_stream_t)(uintptr_t)8;
  REFUSED(com_step(host), BAD, "stream");
  com_model_free(host);
  assert_int_equal(m->result.skipped, 0);
  com_model_free(m);
  com_model_free(untouched);
  close_rig(&rig);
}

/* ---- failures ---- */

TEST(EveryCallOfTheDriverThatFails_IsToldAndLeavesNothing) {
  enum { UNKNOWN_ERROR = 999 };
  int64_t failures = 0;
  for (int64_t nth = 0;; ++nth) {
    rig_t rig;
    open_rig(&rig);
    com_model_t* m = fill_model(rig.context);
    const sluice_optimizer_config_t config = com_config_of(rig.context);
    sluice_fake_cuda_fail_call(nth, UNKNOWN_ERROR);
    sluice_status_t status = sluice_optimizer_create(&config, &m->optimizer);
    if (status == SLUICE_OK) status = com_step(m);
    const int has_failed = sluice_fake_cuda_failed();
    sluice_fake_cuda_fail_call(-1, 0);
    if (has_failed) assert_int_not_equal(status, SLUICE_OK);
    if (!has_failed) assert_int_equal(status, SLUICE_OK);
    failures += has_failed;
    com_model_free(m);
    close_rig(&rig);
    if (!has_failed) break;
  }
  assert_true(failures > 30);
}
