/* The optimizer that leaves the device, by its public calls on a fake CUDA device: bits of a step in host memory, bytes
 * to the byte, all or nothing, what it refuses, and every call of the driver that fails. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/base/alloc.h"
#include "backend/base/dtype.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/refusals.h"
#include "sluice/optimizer.h"

enum { COUNT_OF_A = 1500, COUNT_OF_B = 4100, ELEMENTS = COUNT_OF_A + COUNT_OF_B, BUCKET = 1024, STEPS = 3 };

/* ---- a model of two tensors, in two groups ---- */

typedef struct model_s {
  uint16_t *param, *grad; /* bf16, of the device or of the host */
  float master[ELEMENTS], exp_avg[ELEMENTS], exp_avg_sq[ELEMENTS];
  sluice_optimizer_tensor_t tensors[2];
  sluice_optimizer_group_t groups[2];
  const sluice_optimizer_group_t* group_list[2];
  sluice_optimizer_step_args_t args;
  sluice_optimizer_t* optimizer;
  sluice_context_t* context; /* NULL: in host memory */
} model_t;

static void* take(const model_t* m, uint64_t bytes) {
  return m->context != NULL ? sluice_fake_cuda_take(0, bytes) : malloc(bytes);
}

static void give(const model_t* m, void* data) {
  if (m->context != NULL) {
    sluice_fake_cuda_give(data);
  } else {
    free(data);
  }
}

static void set_tensor(model_t* m, int which, int64_t first, int64_t count) {
  m->tensors[which] = (sluice_optimizer_tensor_t){.count = count,
                                                  .step = 1,
                                                  .param = m->param + first,
                                                  .master = m->master + first,
                                                  .grad = m->grad + first,
                                                  .exp_avg = m->exp_avg + first,
                                                  .exp_avg_sq = m->exp_avg_sq + first,
                                                  .param_dtype = SLUICE_DTYPE_BF16,
                                                  .grad_dtype = SLUICE_DTYPE_BF16};
  sluice_optimizer_group_init(&m->groups[which], sizeof m->groups[which]);
  m->groups[which].tensors = &m->tensors[which];
  m->groups[which].num_tensors = 1;
  m->group_list[which] = &m->groups[which];
}

static void set_gradients(model_t* m, int64_t step) {
  for (int64_t i = 0; i < ELEMENTS; ++i)
    m->grad[i] = sluice_f32_to_bf16((float)((i * 37 + step * 11) % 29 - 14) / 8.0F);
}

/* The memory of the fake's devices is the host's: it is filled in place. */
static model_t* fill_model(sluice_context_t* context) {
  model_t* m = calloc(1, sizeof *m);
  assert_non_null(m);
  m->context = context;
  m->param = take(m, ELEMENTS * sizeof *m->param);
  m->grad = take(m, ELEMENTS * sizeof *m->grad);
  for (int64_t i = 0; i < ELEMENTS; ++i) {
    m->master[i] = (float)(i % 101 - 50) / 64.0F;
    m->param[i] = sluice_f32_to_bf16(m->master[i]);
  }
  set_tensor(m, 0, 0, COUNT_OF_A);
  set_tensor(m, 1, COUNT_OF_A, COUNT_OF_B);
  m->groups[1].lr = 0.01, m->groups[1].decoupled = 0;
  sluice_optimizer_step_args_init(&m->args, sizeof m->args);
  m->args.groups = m->group_list;
  m->args.num_groups = 2;
  m->args.loss_scale = 4.0;
  m->args.stream = context != NULL ? fakes_stream(0) : NULL;
  set_gradients(m, 1);
  return m;
}

static sluice_optimizer_config_t config_of(sluice_context_t* context) {
  sluice_optimizer_config_t config;
  sluice_optimizer_config_init(&config, sizeof config);
  config.context = context;
  config.device_bucket = BUCKET;
  return config;
}

static model_t* open_model(sluice_context_t* context) {
  model_t* m = fill_model(context);
  const sluice_optimizer_config_t config = config_of(context);
  WORKS(sluice_optimizer_create(&config, &m->optimizer));
  return m;
}

static void close_model(model_t* m) {
  sluice_optimizer_destroy(m->optimizer);
  give(m, m->param);
  give(m, m->grad);
  free(m);
}

static sluice_status_t step(model_t* m, int32_t* out_skipped) {
  sluice_optimizer_step_result_t result;
  sluice_optimizer_step_result_init(&result, sizeof result);
  const sluice_status_t status = sluice_optimizer_step(m->optimizer, &m->args, &result);
  *out_skipped = result.skipped;
  if (m->context != NULL) fakes_machine()->settle(0);
  return status;
}

static void advance(model_t* m) {
  for (int i = 0; i < 2; ++i) ++m->tensors[i].step;
}

static void expect_equal(const model_t* a, const model_t* b) {
  assert_memory_equal(a->param, b->param, ELEMENTS * sizeof *a->param);
  assert_memory_equal(a->master, b->master, sizeof a->master);
  assert_memory_equal(a->exp_avg, b->exp_avg, sizeof a->exp_avg);
  assert_memory_equal(a->exp_avg_sq, b->exp_avg_sq, sizeof a->exp_avg_sq);
}

/* A layer on the device whose passes run between steps: the optimizer shares its context. */
static void open_rig(rig_t* rig) {
  sluice_moe_config_t config = rig_config();
  fakes_open(1, 1);
  rig_use_machine(fakes_machine(), 0);
  if (rig_open(rig, NULL, &config) != SLUICE_OK) fail_msg("%s", last_message());
}

static void close_rig(rig_t* rig) {
  char text[400];
  rig_close(rig);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazards: %s", text);
  if (fakes_close(text, sizeof text) != 0) fail_msg("left: %s", text);
  rig_use_machine(NULL, 0);
}

/* ---- numbers ---- */

static void Steps_OnADevice_HaveTheBitsOfThoseInHostMemory(void** state) {
  (void)state;
  rig_t rig;
  uint64_t digest;
  open_rig(&rig);
  model_t *device = open_model(rig.context), *host = open_model(NULL);
  for (int64_t t = 1; t <= STEPS; ++t) {
    int32_t skipped[2] = {1, 1};
    set_gradients(device, t), set_gradients(host, t);
    WORKS(rig_round(&rig, &digest));
    WORKS(step(device, &skipped[0]));
    WORKS(step(host, &skipped[1]));
    assert_int_equal(skipped[0] + skipped[1], 0);
    expect_equal(device, host);
    advance(device), advance(host);
  }
  close_model(device), close_model(host);
  close_rig(&rig);
}

static void Step_WithAGradientThatIsNoNumber_IsSkippedAndChangesNothing(void** state) {
  (void)state;
  rig_t rig;
  open_rig(&rig);
  model_t *device = open_model(rig.context), *untouched = fill_model(NULL);
  for (int i = 0; i < 2; ++i) {
    int32_t skipped = 0;
    uint16_t* at = device->grad + (i == 0 ? 3 : ELEMENTS - 1);
    const uint16_t was = *at;
    *at = sluice_f32_to_bf16(i == 0 ? NAN : -INFINITY);
    WORKS(step(device, &skipped));
    assert_int_equal(skipped, 1);
    expect_equal(device, untouched);
    *at = was;
  }
  close_model(device), close_model(untouched);
  close_rig(&rig);
}

/* ---- bytes ---- */

static uint64_t bytes_now(sluice_context_t* context) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(context, 0, &stats));
  return stats.current_bytes;
}

static void Device_HoldsWhatIsPredictedToTheByte(void** state) {
  (void)state;
  rig_t rig;
  int32_t skipped;
  for (int32_t slots = 1; slots <= 2; ++slots) {
    open_rig(&rig);
    const uint64_t before = bytes_now(rig.context);
    model_t* m = fill_model(rig.context);
    sluice_optimizer_config_t config = config_of(rig.context);
    config.device_num_slots = slots;
    WORKS(sluice_optimizer_create(&config, &m->optimizer));
    WORKS(step(m, &skipped));
    sluice_optimizer_workload_t workload;
    sluice_optimizer_workload_init(&workload, sizeof workload);
    workload.count = ELEMENTS, workload.bucket = BUCKET, workload.num_slots = slots, workload.sum_buckets = 1;
    sluice_optimizer_prediction_t predicted;
    sluice_optimizer_prediction_init(&predicted, sizeof predicted);
    WORKS(sluice_optimizer_predict(&workload, &predicted));
    const uint64_t taken = bytes_now(rig.context) - before;
    assert_int_equal(taken, 16 * BUCKET * (uint64_t)slots);
    assert_int_equal(4 * ELEMENTS + taken, predicted.near_bytes); /* 4 phi + 16 bucket, for each slot */
    close_model(m);
    assert_int_equal(bytes_now(rig.context), before);
    close_rig(&rig);
  }
}

/* ---- life ---- */

static void Context_OutlivesItsHandleForTheOptimizer(void** state) {
  (void)state;
  rig_t rig;
  int32_t skipped = 1;
  open_rig(&rig);
  model_t *device = open_model(rig.context), *host = open_model(NULL);
  rig_close(&rig); /* layer and context */
  WORKS(step(device, &skipped));
  WORKS(step(host, &skipped));
  expect_equal(device, host);
  close_model(device), close_model(host);
  char left[200];
  if (fakes_close(left, sizeof left) != 0) fail_msg("left: %s", left);
  rig_use_machine(NULL, 0);
}

/* ---- what is refused ---- */

static void Config_ThatCannotBe_IsRefusedByName(void** state) {
  (void)state;
  rig_t rig;
  open_rig(&rig);
  sluice_optimizer_t* optimizer = NULL;
  sluice_optimizer_config_t config = config_of(rig.context);
  config.device_bucket = 0;
  REFUSED(sluice_optimizer_create(&config, &optimizer), BAD, "buckets of 0");
  config = config_of(rig.context);
  config.device_num_slots = 3;
  REFUSED(sluice_optimizer_create(&config, &optimizer), BAD, "3 slots");
  config = config_of(rig.context);
  config.reserved = 1;
  REFUSED(sluice_optimizer_create(&config, &optimizer), BAD, "reserved");
  config = config_of(rig.context);
  sluice_fake_cuda_refuse(0);
  REFUSED(sluice_optimizer_create(&config, &optimizer), SLUICE_E_NO_MEMORY, "buckets on the device");
  assert_null(optimizer);
  close_rig(&rig);

  sluice_context_t* on_cpu = NULL;
  sluice_context_config_t cpu;
  sluice_context_config_init(&cpu, sizeof cpu);
  cpu.gemm = "ref";
  WORKS(sluice_context_create(&cpu, NULL, &on_cpu));
  config = config_of(on_cpu);
  REFUSED(sluice_optimizer_create(&config, &optimizer), SLUICE_E_UNSUPPORTED, "host memory");
  assert_null(optimizer);
  sluice_context_destroy(on_cpu);
}

static void Step_OnADevice_RefusesByNameWhatItDoesNotDo(void** state) {
  (void)state;
  rig_t rig;
  int32_t skipped;
  open_rig(&rig);
  model_t *m = open_model(rig.context), *untouched = fill_model(NULL);
  m->args.max_norm = 1.0;
  REFUSED(step(m, &skipped), SLUICE_E_UNSUPPORTED, "max_norm");
  m->args.max_norm = 0.0;
  m->args.comm = (sluice_comm_t*)(uintptr_t)8; /* refused before it is looked at */
  REFUSED(step(m, &skipped), SLUICE_E_UNSUPPORTED, "comm");
  m->args.comm = NULL;
  m->args.file = (sluice_optimizer_file_t*)(uintptr_t)8;
  REFUSED(step(m, &skipped), SLUICE_E_UNSUPPORTED, "file");
  m->args.file = NULL;
  m->tensors[1].grad = m->master;
  REFUSED(step(m, &skipped), BAD, "tensor 0 of group 1: grad");
  m->tensors[1].grad = m->grad + COUNT_OF_A;
  m->tensors[0].master = NULL;
  REFUSED(step(m, &skipped), BAD, "tensor 0 of group 0: master");
  m->tensors[0].master = m->master;
  sluice_fake_cuda_begin_capture(fakes_stream(0));
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_STATE, "captured");
  sluice_fake_graph_t* graph = NULL;
  (void)sluice_fake_cuda_end_capture(fakes_stream(0), &graph);
  sluice_fake_cuda_destroy_graph(graph);
  expect_equal(m, untouched);
  WORKS(step(m, &skipped)); /* and the next one works */
  assert_int_equal(skipped, 0);
  close_model(m);
  close_model(untouched);
  close_rig(&rig);
}

static void Step_InHostMemoryWithAStream_IsRefused(void** state) {
  (void)state;
  int32_t skipped;
  model_t* m = open_model(NULL);
  m->args.stream = (sluice_stream_t)(uintptr_t)8;
  REFUSED(step(m, &skipped), BAD, "stream");
  close_model(m);
}

/* ---- failures ---- */

static void EveryCallOfTheDriverThatFails_IsToldAndLeavesNothing(void** state) {
  (void)state;
  enum { UNKNOWN_ERROR = 999 };
  int64_t failures = 0;
  for (int64_t nth = 0;; ++nth) {
    rig_t rig;
    int32_t skipped;
    open_rig(&rig);
    model_t* m = fill_model(rig.context);
    const sluice_optimizer_config_t config = config_of(rig.context);
    sluice_fake_cuda_fail_call(nth, UNKNOWN_ERROR);
    sluice_status_t status = sluice_optimizer_create(&config, &m->optimizer);
    if (status == SLUICE_OK) status = step(m, &skipped);
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Steps_OnADevice_HaveTheBitsOfThoseInHostMemory),
      cmocka_unit_test(Step_WithAGradientThatIsNoNumber_IsSkippedAndChangesNothing),
      cmocka_unit_test(Device_HoldsWhatIsPredictedToTheByte),
      cmocka_unit_test(Context_OutlivesItsHandleForTheOptimizer),
      cmocka_unit_test(Config_ThatCannotBe_IsRefusedByName),
      cmocka_unit_test(Step_OnADevice_RefusesByNameWhatItDoesNotDo),
      cmocka_unit_test(Step_InHostMemoryWithAStream_IsRefused),
      cmocka_unit_test(EveryCallOfTheDriverThatFails_IsToldAndLeavesNothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
