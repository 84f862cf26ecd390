/* The device's gate against the host's. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

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

/* Logits are far from each other, so that scores with different rounding give the same choice, or (ties) many are
 * equal. */
static const char* gate(int64_t tokens, int32_t experts, int32_t top_k, int32_t score, int ties) {
  const char* problem = NULL;
  int64_t at_logits[2] = {tokens, experts}, at_routes[2] = {tokens, top_k}, at_bias[1] = {experts};
  gpu_array_t logits = gpu_array(tokens * experts * 4), bias = gpu_array((int64_t)experts * 4),
              ids = gpu_array(tokens * top_k * 4), weights = gpu_array(tokens * top_k * 4);
  for (int64_t i = 0; i < tokens * experts; ++i) {
    int64_t t = i / experts, e = i % experts;
    ((float*)logits.host)[i] = (float)((e * 37 + t * 11) % (ties ? 5 : 997)) * 0.00117f - 0.4f;
  }
  for (int32_t e = 0; e < experts; ++e) ((float*)bias.host)[e] = (float)(e % 3);
  sluice_gate_config_t config;
  sluice_gate_config_init(&config, sizeof config);
  config.num_experts = experts, config.top_k = top_k, config.score = score, config.renormalize = 1;
  config.scaling = 2.5f;
  sluice_tensor_t l = tensor(logits.host, at_logits, 2, SLUICE_TYPE_FLOAT),
                  b = tensor(bias.host, at_bias, 1, SLUICE_TYPE_FLOAT),
                  i = tensor(ids.host, at_routes, 2, SLUICE_TYPE_INT),
                  w = tensor(weights.host, at_routes, 2, SLUICE_TYPE_FLOAT);
  if (sluice_gate_forward(&config, &l, &b, &i, &w, NULL, NULL, NULL) != SLUICE_OK) gpu_die("the host's gate");
  gpu_send(&logits), gpu_send(&bias);
  const sluice_gate_kernel_args_t args = {.logits = logits.there,
                                          .bias = bias.there,
                                          .ids = ids.there,
                                          .weights = weights.there,
                                          .units = tokens,
                                          .num_experts = experts,
                                          .top_k = top_k,
                                          .logits_stride = experts,
                                          .ids_t = top_k,
                                          .ids_k = 1,
                                          .weights_t = top_k,
                                          .weights_k = 1,
                                          .score = score,
                                          .renormalize = 1,
                                          .scaling = 2.5f};
  gpu_enter();
  sluice_cuda_gate(NULL, &args);
  gpu_leave();
  gpu_fetch(&ids);
  for (int64_t r = 0; r < tokens * top_k; ++r) {
    if (((int32_t*)ids.back)[r] != ((int32_t*)ids.host)[r]) problem = "another expert than the host's";
  }
  /* Two versions of expf accurate to two ulps, then a few roundings. */
  if (problem == NULL) problem = gpu_differs(&weights, SLUICE_DTYPE_F32, 16 * 0x1p-24, 0);
  gpu_drop(&logits), gpu_drop(&bias), gpu_drop(&ids), gpu_drop(&weights);
  return problem;
}

void gpu_report_gate(void) {
  static const int32_t shapes[][2] = {{1, 1}, {8, 2}, {33, 5}, {64, 1}, {256, 8}, {40, 40}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int bits = 0; bits < 4; ++bits) {
      char name[64];
      int32_t score = bits & 1 ? SLUICE_SCORE_SIGMOID : SLUICE_SCORE_SOFTMAX;
      snprintf(name, sizeof name, "gate E=%d K=%d score %d%s", shapes[s][0], shapes[s][1], score,
               bits & 2 ? ", ties" : "");
      gpu_report(name, gate(100, shapes[s][0], shapes[s][1], score, bits & 2));
    }
  }
}
