// SPDX-License-Identifier: Apache-2.0
/* Adam on the device has the same bits as Adam on the host. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/test/elements.h"
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/device/adam_kernels.h"
#include "backend/optim/adam.h"

enum { COUNT = 10007, STEP = 3 };

static const sluice_adam_rule_t rule = {1e-2, 0.9, 0.99, 1e-8, 0.1, 1, 1, 0};

typedef struct states_s {
  gpu_array_t grad, staged, master, exp_avg, exp_avg_sq, param;
} states_t;

static sluice_status_t run(const states_t* a, int32_t dtype) {
  const sluice_device_adam_kernels_t* kernels = gpu_rig.device->memory->adam;
  const sluice_adam_numbers_t n = sluice_adam_numbers_of(&rule, STEP, 1.0 / 3.0);
  const sluice_device_adam_t adam = {
      .count = COUNT,
      .grad = a->staged.there,
      .master = a->master.there,
      .exp_avg = a->exp_avg.there,
      .exp_avg_sq = a->exp_avg_sq.there,
      .param = a->param.there,
      .dtype = dtype,
      .numbers = {n.grad_scale, n.l2, n.one_minus_beta1, n.one_minus_beta2, n.decay, n.epsilon_high, n.epsilon_low,
                  n.step_high, n.step_low},
  };
  const sluice_status_t status = kernels->stage(gpu_rig.device, NULL, a->grad.there, dtype, COUNT, a->staged.there);
  return status != SLUICE_OK ? status : kernels->update(gpu_rig.device, NULL, &adam);
}

static void step_on_host(const states_t* a, int32_t dtype) {
  const sluice_adam_tensor_t tensor = {
      COUNT, STEP, a->param.host, a->master.host, a->grad.host, a->exp_avg.host, a->exp_avg_sq.host, dtype, dtype};
  const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&rule, STEP, 1.0 / 3.0);
  sluice_adam_plain->update(&tensor, 0, COUNT, &numbers);
}

static const char* first_problem(const states_t* a, int32_t dtype) {
  const char* problem = gpu_differs(&a->master, SLUICE_DTYPE_F32, 0, 0);
  if (problem == NULL) problem = gpu_differs(&a->exp_avg, SLUICE_DTYPE_F32, 0, 0);
  if (problem == NULL) problem = gpu_differs(&a->exp_avg_sq, SLUICE_DTYPE_F32, 0, 0);
  return problem != NULL ? problem : gpu_differs(&a->param, dtype, 0, 0);
}

static const char* step(int32_t dtype, int64_t bytes) {
  states_t a = {gpu_randoms(dtype, COUNT),
                gpu_array((int64_t)COUNT * 4),
                gpu_randoms(SLUICE_DTYPE_F32, COUNT),
                gpu_randoms(SLUICE_DTYPE_F32, COUNT),
                gpu_randoms(SLUICE_DTYPE_F32, COUNT),
                gpu_array(COUNT * bytes)};
  float* v = a.exp_avg_sq.host;
  for (int64_t i = 0; i < COUNT; ++i) v[i] = v[i] < 0.0F ? -v[i] : v[i];
  v[7] = INFINITY;
  ((float*)a.master.host)[9] = -INFINITY;
  gpu_send(&a.exp_avg_sq), gpu_send(&a.master);
  step_on_host(&a, dtype);
  const char* problem = run(&a, dtype) == SLUICE_OK ? first_problem(&a, dtype) : last_message();
  gpu_drop(&a.grad), gpu_drop(&a.staged), gpu_drop(&a.master);
  gpu_drop(&a.exp_avg), gpu_drop(&a.exp_avg_sq), gpu_drop(&a.param);
  return problem;
}

/* Checks the flags of gradients: one of them, or none, is infinite, and some are above 1/4. */
static const char* look(int32_t dtype, int64_t bytes, int64_t bad) {
  const float limit = 0.25F;
  gpu_array_t grad = gpu_randoms(dtype, COUNT), flags = gpu_array(sizeof(int32_t) * SLUICE_ADAM_NUM_FLAGS);
  if (bad >= 0) {
    const uint32_t infinity = dtype == SLUICE_DTYPE_F32 ? 0x7f800000u : dtype == SLUICE_DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    memcpy((char*)grad.host + bad * bytes, &infinity, (size_t)bytes);
    gpu_send(&grad);
  }
  memset(flags.host, 0, sizeof(int32_t) * SLUICE_ADAM_NUM_FLAGS);
  gpu_send(&flags);
  const sluice_status_t status =
      gpu_rig.device->memory->adam->look(gpu_rig.device, NULL, grad.there, dtype, COUNT, limit, flags.there);
  gpu_fetch(&flags);
  int32_t found[SLUICE_ADAM_NUM_FLAGS];
  memcpy(found, flags.back, sizeof found);
  gpu_drop(&grad), gpu_drop(&flags);
  if (status != SLUICE_OK) return last_message();
  if (found[SLUICE_ADAM_IS_LARGE] != 1) return "no gradient above the limit is seen";
  return found[SLUICE_ADAM_IS_NOT_FINITE] == (bad >= 0) ? NULL : "the flag of what is not finite is wrong";
}

/* Parts are added in order, beginning with the first. */
static const char* sum(int32_t dtype) {
  enum { PARTS = 5, STRIDE = 2000, EACH = 1999 };
  gpu_array_t parts = gpu_randoms(dtype, (int64_t)PARTS * STRIDE), out = gpu_array((int64_t)EACH * 4);
  const sluice_device_parts_t of = {parts.there, dtype, PARTS, STRIDE};
  float* wanted = out.host;
  for (int64_t i = 0; i < EACH; ++i) {
    for (int64_t part = 0; part < PARTS; ++part) {
      const float x = (float)get_element(parts.host, part * STRIDE + i, dtype);
      wanted[i] = part == 0 ? x : wanted[i] + x;
    }
  }
  const sluice_status_t status = gpu_rig.device->memory->adam->sum(gpu_rig.device, NULL, &of, EACH, out.there);
  const char* problem = status == SLUICE_OK ? gpu_differs(&out, SLUICE_DTYPE_F32, 0, 0) : last_message();
  gpu_drop(&parts), gpu_drop(&out);
  return problem;
}

void gpu_part_adam(void) {
  static const struct {
    int32_t dtype;
    int64_t bytes;
    const char* name;
  } of[] = {{SLUICE_DTYPE_F32, 4, "f32"}, {SLUICE_DTYPE_BF16, 2, "bf16"}, {SLUICE_DTYPE_F16, 2, "f16"}};
  char name[80];
  for (int i = 0; i < 3; ++i) {
    (void)snprintf(name, sizeof name, "a step of Adam, %s", of[i].name);
    gpu_report(name, step(of[i].dtype, of[i].bytes));
    const char* problem = look(of[i].dtype, of[i].bytes, -1);
    if (problem == NULL) problem = look(of[i].dtype, of[i].bytes, 0);
    if (problem == NULL) problem = look(of[i].dtype, of[i].bytes, COUNT - 1);
    (void)snprintf(name, sizeof name, "gradients that are not finite are seen, %s", of[i].name);
    gpu_report(name, problem);
    (void)snprintf(name, sizeof name, "gradients of ranks are summed in their order, %s", of[i].name);
    gpu_report(name, sum(of[i].dtype));
  }
}
