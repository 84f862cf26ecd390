// SPDX-License-Identifier: Apache-2.0
/* Compares the gate on the device with the gate on the host. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/cts/gpu/gpu_routing.h"
#include "backend/device/cuda/cuda_routing.h"
#include "sluice/gate.h"

static sluice_tensor_t tensor(void* data, int64_t* shape, int32_t ndim, int32_t type) {
  return (sluice_tensor_t){.data = data,
                           .device_type = SLUICE_DEVICE_CPU,
                           .ndim = ndim,
                           .type_code = (uint8_t)type,
                           .type_bits = 32,
                           .type_lanes = 1,
                           .shape = shape};
}

#ifdef SLUICE_GPU_SUITE_FAKE
#define TOLERANCE (4 * 0x1p-24) /* f64 sums in another order, then a few roundings */
#define SPACING   0.0117f
#else
#define TOLERANCE (16 * 0x1p-24) /* two versions of expf accurate to two ulps, then a few roundings */
#define SPACING   0.00117f
#endif

enum { SIGMOID = 1, RENORMALIZE = 2, BIASED = 4, TIES = 8 };

/* Logits are far from each other, so that scores with different rounding give the same choice, or (ties) many are
 * equal. The device's ids are k-major. */
static const char* gate(int64_t tokens, int32_t experts, int32_t top_k, int kinds) {
  const int32_t score = kinds & SIGMOID ? SLUICE_SCORE_SIGMOID : SLUICE_SCORE_SOFTMAX;
  const int32_t renormalize = (kinds & RENORMALIZE) != 0;
  const char* problem = NULL;
  int64_t at_logits[2] = {tokens, experts}, at_routes[2] = {tokens, top_k}, at_bias[1] = {experts};
  gpu_array_t logits = gpu_array(tokens * experts * 4), bias = gpu_array((int64_t)experts * 4),
              ids = gpu_array(tokens * top_k * 4), weights = gpu_array(tokens * top_k * 4);
  for (int64_t i = 0; i < tokens * experts; ++i) {
    int64_t t = i / experts, e = i % experts;
    ((float*)logits.host)[i] = (float)((e * 37 + t * 11) % (kinds & TIES ? 5 : 997)) * SPACING - 340 * SPACING;
  }
  for (int32_t e = 0; e < experts; ++e) ((float*)bias.host)[e] = (float)(e % 3);
  sluice_gate_config_t config;
  sluice_gate_config_init(&config, sizeof config);
  config.num_experts = experts, config.top_k = top_k, config.score = score;
  config.renormalize = renormalize;
  config.scaling = 2.5f;
  sluice_tensor_t l = tensor(logits.host, at_logits, 2, SLUICE_TYPE_FLOAT),
                  b = tensor(bias.host, at_bias, 1, SLUICE_TYPE_FLOAT),
                  i = tensor(ids.host, at_routes, 2, SLUICE_TYPE_INT),
                  w = tensor(weights.host, at_routes, 2, SLUICE_TYPE_FLOAT);
  if (sluice_gate_forward(&config, &l, kinds & BIASED ? &b : NULL, &i, &w, NULL, NULL, NULL) != SLUICE_OK)
    gpu_die("the host's gate");
  gpu_send(&logits), gpu_send(&bias);
  const sluice_gate_kernel_args_t args = {.logits = logits.there,
                                          .bias = kinds & BIASED ? bias.there : NULL,
                                          .ids = ids.there,
                                          .weights = weights.there,
                                          .units = tokens,
                                          .num_experts = experts,
                                          .top_k = top_k,
                                          .logits_stride = experts,
                                          .ids_t = 1,
                                          .ids_k = tokens,
                                          .weights_t = top_k,
                                          .weights_k = 1,
                                          .score = score,
                                          .renormalize = renormalize,
                                          .scaling = 2.5f};
  gpu_enter();
  sluice_cuda_gate(NULL, &args);
  gpu_leave();
  gpu_fetch(&ids);
  for (int64_t r = 0; r < tokens * top_k; ++r) {
    const int32_t there = ((int32_t*)ids.back)[r % top_k * tokens + r / top_k];
    if (there != ((int32_t*)ids.host)[r]) problem = "another expert than the host's";
  }
  if (problem == NULL) problem = gpu_differs(&weights, SLUICE_DTYPE_F32, TOLERANCE, 0);
  gpu_drop(&logits), gpu_drop(&bias), gpu_drop(&ids), gpu_drop(&weights);
  return problem;
}

/* Valid ids are chosen whatever the logits are. */
static const char* gate_of_nan(void) {
  static const float given[6] = {NAN, NAN, NAN, 1, NAN, 3};
  static const int32_t want[4] = {0, 1, 2, 0};
  gpu_array_t logits = gpu_array(sizeof given), ids = gpu_array(sizeof want), weights = gpu_array(4 * sizeof(float));
  memcpy(logits.host, given, sizeof given);
  gpu_send(&logits);
  const sluice_gate_kernel_args_t args = {.logits = logits.there,
                                          .ids = ids.there,
                                          .weights = weights.there,
                                          .units = 2,
                                          .num_experts = 3,
                                          .top_k = 2,
                                          .logits_stride = 3,
                                          .ids_t = 2,
                                          .ids_k = 1,
                                          .weights_t = 2,
                                          .weights_k = 1,
                                          .score = SLUICE_SCORE_SIGMOID,
                                          .scaling = 1};
  gpu_enter();
  sluice_cuda_gate(NULL, &args);
  gpu_leave();
  gpu_fetch(&ids), gpu_fetch(&weights);
  const int is_right = memcmp(ids.back, want, sizeof want) == 0 && isnan(((float*)weights.back)[0]);
  gpu_drop(&logits), gpu_drop(&ids), gpu_drop(&weights);
  return is_right ? NULL : "other ids";
}

void gpu_report_gate(void) {
  static const int32_t shapes[][2] = {{1, 1}, {8, 2}, {33, 5}, {64, 1}, {256, 8}, {40, 40}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int kinds = 0; kinds < 2 * TIES; ++kinds) {
      char name[64];
      (void)snprintf(name, sizeof name, "gate E=%d K=%d, kind %d", shapes[s][0], shapes[s][1], kinds);
      gpu_report(name, gate(100, shapes[s][0], shapes[s][1], kinds));
    }
  }
  gpu_report("gate of NaN", gate_of_nan());
}
