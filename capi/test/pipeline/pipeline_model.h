/* The model of a pipeline's world: layers of a few weights, whose rows differ from micro-batch to micro-batch. */
#ifndef SLUICE_CAPI_TEST_PIPELINE_PIPELINE_MODEL_H_
#define SLUICE_CAPI_TEST_PIPELINE_PIPELINE_MODEL_H_

#include "capi/test/pipeline/pipeline_world.h"

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

#endif
