// SPDX-License-Identifier: Apache-2.0
/* The model of a pipeline's world: layers of a few weights, whose rows differ between micro-batches. */
#pragma once

#include <string.h>

#include "capi/test/pipeline/pipeline_types.h"

static inline int32_t pw_elements_of(int32_t micro_batch) { return 3 + 7 * (micro_batch % 5); }

static inline void pw_init_layer(pw_layer_t* layer, int32_t c) {
  for (int32_t w = 0; w < PW_WEIGHTS; ++w) layer->weight[w] = 0.5F + 0.125F * (float)((c * 3 + w * 5) % 7);
}

static inline void pw_make_input(float* x, int32_t batch, int32_t i) {
  for (int32_t e = 0; e < pw_elements_of(i); ++e) x[e] = 0.01F * (float)((batch * 31 + i * 17 + e * 13) % 101) - 0.5F;
}

static inline void pw_layer_forward(const pw_layer_t* layer, const float* x, float* y, int32_t n) {
  for (int32_t e = 0; e < n; ++e) y[e] = x[e] * layer->weight[e % PW_WEIGHTS] + 0.1F * x[e] * x[e];
}

static inline void pw_layer_backward(const pw_layer_t* layer, const float* x, const float* dy, float* dx, int32_t n) {
  for (int32_t e = 0; e < n; ++e) dx[e] = dy[e] * (layer->weight[e % PW_WEIGHTS] + 0.2F * x[e]);
}

static inline void pw_layer_weight_grad(pw_layer_t* layer, const float* x, const float* dy, int32_t n) {
  for (int32_t e = 0; e < n; ++e) layer->grad[e % PW_WEIGHTS] += dy[e] * x[e];
}

static inline float pw_loss_of(const float* y, int32_t n) {
  float sum = 0;
  for (int32_t e = 0; e < n; ++e) sum += 0.5F * y[e] * y[e];
  return sum;
}

static inline int32_t pw_num_layers(const pw_world_t* world) { return world->num_stages * world->config.num_virtual; }

/* Returns whether weight gradients are separate ops. */
static inline int32_t pw_is_split(const pw_world_t* world) {
  const char* policy = world->config.policy;
  if (world->config.separate_wgrad >= 0) return world->config.separate_wgrad;
  return policy != NULL && (strcmp(policy, "zero_bubble") == 0 || strcmp(policy, "v") == 0);
}

static inline int pw_is_v(const pw_world_t* world) {
  return world->config.placement == SLUICE_PIPELINE_V ||
         (world->config.policy != NULL && strcmp(world->config.policy, "v") == 0);
}

/* Returns the k-th layer of a stage. */
static inline int32_t pw_layer_of(const pw_world_t* world, int32_t stage, int32_t k) {
  const int32_t p = world->num_stages;
  return k * p + (pw_is_v(world) && k % 2 == 1 ? p - 1 - stage : stage);
}
