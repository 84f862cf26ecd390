// SPDX-License-Identifier: Apache-2.0
/* The optimizer on a fake CUDA device through its public calls: the bits of a step in host memory, exact bytes, steps
 * that run completely or not at all, errors, and the failure of each driver call. */

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/optimizer/filed_model.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { STEPS = 3, SLOT = 1024 };

static sluice_optimizer_config_t config_on(sluice_context_t* context) {
  DEFAULTS(sluice_optimizer_config, config);
  config.context = context, config.device_bucket = SLOT;
  return config;
}

/* A model on the device, without an optimizer. */
static model_t* fill_model(void) {
  model_t* m = malloc(sizeof *m);
  assert_non_null(m);
  init_model(m);
  move_model(m, fakes_machine(), 0);
  return m;
}

static model_t* open_on(sluice_optimizer_config_t config) {
  model_t* m = fill_model();
  WORKS(sluice_optimizer_create(&config, &m->optimizer));
  return m;
}

static void expect_equal(const model_t* a, const model_t* b) { assert_memory_equal(&a->s, &b->s, sizeof a->s); }

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
  model_t *device = open_on(config_on(rig.context)), *host = open_model();
  for (int t = 1; t <= STEPS; ++t) {
    if (t < STEPS) WORKS(rig_round(&rig, &digest));
    if (t == STEPS) rig_close(&rig);
    step_model(device, t), step_model(host, t);
    assert_int_equal(device->result.skipped + host->result.skipped, 0);
    expect_equal(device, host);
  }
  close_model(device), close_model(host);
  fakes_must_be_clean();
  rig_use_machine(NULL, 0);
}

/* Tensors end at no multiple of a bucket's size, and events alone order copies and kernels. */
TEST(Steps_InBucketsOfAnySize_HaveTheBitsOfThoseInHostMemory) {
  const int64_t sizes[] = {129, 1000, 1024, ELEMENTS, 2 * ELEMENTS};
  for (int i = 0; i < 5 * 2; ++i) {
    rig_t rig;
    open_rig(&rig);
    sluice_optimizer_config_t config = config_on(rig.context);
    config.device_bucket = sizes[i % 5], config.device_num_slots = 1 + i / 5;
    model_t *device = open_on(config), *host = open_model();
    for (int t = 1; t <= STEPS; ++t) {
      set_gradients(device, t, 0), set_gradients(host, t, 0);
      device->tensors[2].step = host->tensors[2].step = t + 2; /* step counts differ per tensor */
      WORKS(run_step(device));
      WORKS(run_step(host));
      expect_equal(device, host);
    }
    close_model(device), close_model(host);
    close_rig(&rig);
  }
}

/* ---- bytes ---- */

TEST(Device_HoldsWhatIsPredictedToTheByte) {
  rig_t rig;
  for (int32_t slots = 1; slots <= 2; ++slots) {
    open_rig(&rig);
    const uint64_t before = own_rig_stats(&rig).current_bytes;
    sluice_optimizer_config_t config = config_on(rig.context);
    config.device_num_slots = slots;
    model_t* m = open_on(config);
    WORKS(run_step(m));
    DEFAULTS(sluice_optimizer_workload, workload);
    workload.count = ELEMENTS, workload.bucket = SLOT, workload.num_slots = slots, workload.sum_buckets = 1;
    DEFAULTS(sluice_optimizer_prediction, predicted);
    WORKS(sluice_optimizer_predict(&workload, &predicted));
    const uint64_t taken = own_rig_stats(&rig).current_bytes - before;
    assert_int_equal(taken, 16 * SLOT * (uint64_t)slots);
    assert_int_equal(4 * ELEMENTS + taken, predicted.near_bytes); /* 4 phi + 16 bucket, for each slot */
    close_model(m);
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
#define REFUSES(change, status, text)      \
  config = config_on(rig.context), change; \
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
  config = config_on(on_cpu);
  REFUSED(sluice_optimizer_create(&config, &optimizer), SLUICE_E_UNSUPPORTED, "host memory");
  assert_null(optimizer);
  sluice_context_destroy(on_cpu);
}

TEST(Step_OnADevice_RefusesByNameWhatItDoesNotDo) {
  rig_t rig;
  open_rig(&rig);
  model_t *m = open_on(config_on(rig.context)), *untouched = open_model(), *host = open_model();
  const model_t good = *m;
#define REFUSES(field, value, status, text) \
  m->field = (value);                       \
  REFUSED(run_step(m), status, text);       \
  m->field = good.field
  REFUSES(args.max_norm, 1.0, SLUICE_E_UNSUPPORTED, "max_norm");
  /* A file is rejected before it is dereferenced. */
  REFUSES(args.file, (sluice_optimizer_file_t*)(uintptr_t)8, SLUICE_E_UNSUPPORTED, "file");
  REFUSES(tensors[2].grad, m->grad, BAD, "tensor 0 of group 1: grad");
  REFUSES(tensors[0].master, NULL, BAD, "tensor 0 of group 0: master");
  REFUSES(tensors[0].param, m->s.param, BAD, "tensor 0 of group 0: param");
  REFUSES(tensors[0].step, 0, BAD, "tensor 0 of group 0 is at step 0");
#undef REFUSES
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_STATE, "captured");
  sluice_fake_graph_t* graph = NULL;
  (void)sluice_fake_cuda_end_capture(fakes_stream(0), &graph);
  sluice_fake_cuda_destroy_graph(graph);
  expect_equal(m, untouched);
  WORKS(run_step(m)); /* and the next one works */
  host->args.stream = (sluice_stream_t)(uintptr_t)8;
  REFUSED(run_step(host), BAD, "stream");
  assert_int_equal(m->result.skipped, 0);
  close_model(m), close_model(untouched), close_model(host);
  close_rig(&rig);
}

/* ---- failures ---- */

TEST(EveryCallOfTheDriverThatFails_IsToldAndLeavesNothing) {
  enum { UNKNOWN_ERROR = 999 };
  int64_t failures = 0;
  for (int64_t nth = 0;; ++nth) {
    rig_t rig;
    open_rig(&rig);
    model_t* m = fill_model();
    const sluice_optimizer_config_t config = config_on(rig.context);
    sluice_fake_cuda_fail_call(nth, UNKNOWN_ERROR);
    sluice_status_t status = sluice_optimizer_create(&config, &m->optimizer);
    if (status == SLUICE_OK) status = run_step(m);
    const int has_failed = sluice_fake_cuda_failed();
    sluice_fake_cuda_fail_call(-1, 0);
    if (has_failed) assert_int_not_equal(status, SLUICE_OK);
    if (!has_failed) assert_int_equal(status, SLUICE_OK);
    failures += has_failed;
    close_model(m);
    close_rig(&rig);
    if (!has_failed) break;
  }
  assert_true(failures > 30);
}
