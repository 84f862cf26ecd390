// SPDX-License-Identifier: Apache-2.0
/* Callback experts on CUDA contexts, on fakes: work on another stream than the layer's is detected, unless it is
 * joined. cuda_layer_test checks results, the single read, and hazards; cuda_plan_test budgets; ranks_fail_test
 * failures. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/moe/context/context.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/rig.h"

static sluice_moe_config_t config_of(int32_t restore_input, int32_t restore_pre_activation) {
  sluice_moe_config_t config = rig_config();
  config.callback_experts = 1;
  config.restore_input = restore_input, config.restore_pre_activation = restore_pre_activation;
  return config;
}

/* A host that computes on its own stream, which events may join with the layer's before and after. */
typedef struct elsewhere_s {
  rig_t* rig;
  void* stream;
  void* events[2];
  int32_t is_joined[2];
  int32_t calls;
} elsewhere_t;

static void follow(const elsewhere_t* e, int which, void* later, void* earlier) {
  const sluice_cuda_driver_t* driver = sluice_fake_cuda_driver();
  if (!e->is_joined[which]) return;
  assert_int_equal(driver->cuEventRecord(e->events[which], earlier), 0);
  assert_int_equal(driver->cuStreamWaitEvent(later, e->events[which], 0), 0);
}

static int32_t forward_elsewhere(void* user, int32_t chunk, int32_t expert, int64_t rows, const void* x, void* y) {
  elsewhere_t* e = user;
  (void)chunk, (void)expert;
  follow(e, 0, e->stream, fakes_stream(0));
  e->rig->context->device->kernels->scale_rows(e->stream, e->rig->config.dtype, rows, e->rig->config.model_width, x,
                                               e->rig->twos.tensor.data, y);
  follow(e, 1, fakes_stream(0), e->stream);
  ++e->calls;
  return 0;
}
static int32_t backward_elsewhere(void* user, int32_t chunk, int32_t expert, int64_t rows, const void* x,
                                  const void* dy, void* dx) {
  (void)x;
  return forward_elsewhere(user, chunk, expert, rows, dy, dx);
}

static int64_t hazards_of(const sluice_moe_config_t* config, int32_t joined_before, int32_t joined_behind) {
  const sluice_cuda_driver_t* driver = sluice_fake_cuda_driver();
  rig_t rig;
  open_all(&rig, config);
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK); /* creates everything that is created once */
  elsewhere_t e = {.rig = &rig, .is_joined = {joined_before, joined_behind}};
  assert_int_equal(sluice_cuda_enter(rig.context->device), SLUICE_OK);
  e.stream = sluice_fake_cuda_open_stream(0);
  for (int i = 0; i < 2; ++i) assert_int_equal(driver->cuEventCreate(&e.events[i], SLUICE_CU_EVENT_DISABLE_TIMING), 0);
  assert_int_equal(sluice_cuda_leave(rig.context->device), SLUICE_OK);
  rig.callbacks = (sluice_expert_callbacks_t){sizeof rig.callbacks, &e, forward_elsewhere, backward_elsewhere};
  sluice_step_t* step = NULL;
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
  sluice_step_drop(step);
  assert_true(e.calls >= 8); /* 4 experts, forward and backward */
  fakes_machine()->settle(0);
  while (!sluice_fake_cuda_idle(e.stream)) continue;
  for (int i = 0; i < 2; ++i) assert_int_equal(driver->cuEventDestroy_v2(e.events[i]), 0);
  sluice_fake_cuda_close_stream(e.stream);
  return close_all(&rig);
}

TEST(CudaCallback_WorkOnAnotherStream_IsAHazardUnlessItIsJoined) {
  const int32_t pre_activations[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_RECOMPUTE};
  for (int m = 0; m < 2; ++m) {
    const sluice_moe_config_t config = config_of(SLUICE_RESTORE_KEEP, pre_activations[m]);
    assert_int_equal(hazards_of(&config, 1, 1), 0);
    assert_true(hazards_of(&config, 0, 1) > 0);
    assert_true(hazards_of(&config, 1, 0) > 0);
    assert_true(hazards_of(&config, 0, 0) > 0);
  }
}
