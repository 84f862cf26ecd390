// SPDX-License-Identifier: Apache-2.0
/* Sluice's own gate: scores, choices, capacity, weights, losses, and the gradient of the last two. */
#include "sluice/gate.h"

#include <math.h>
#include <string.h>

#include "backend/base/tensor.h"
#include "backend/gate/gate_choice.h"
#include "backend/gate/gate_drop.h"

/* A tensor's elements by strides, for [T, K]. */
typedef struct {
  char* data;
  int64_t t, k; /* bytes from one token to the next, from one choice to the next */
} strided_t;

static strided_t strided(const sluice_tensor_t* tensor, int64_t element_bytes) {
  strided_t s = {0};
  if (tensor == NULL) return s;
  s.data = sluice_tensor_data(tensor);
  s.t = sluice_tensor_stride(tensor, 0) * element_bytes;
  s.k = sluice_tensor_stride(tensor, 1) * element_bytes;
  return s;
}
static int32_t* id_at(strided_t s, int64_t t, int64_t k) { return (int32_t*)(void*)(s.data + t * s.t + k * s.k); }
static float* real_at(strided_t s, int64_t t, int64_t k) { return (float*)(void*)(s.data + t * s.t + k * s.k); }

/* ---- arguments ------------------------------------------------------------------------------------------------ */

/* f32 [T, E] with unit column stride. */
static sluice_status_t check_rows(const sluice_tensor_t* tensor, const char* name, int64_t num_tokens,
                                  int32_t num_experts) {
  int64_t shape[2] = {num_tokens, num_experts};
  SLUICE_TRY(sluice_tensor_check(tensor, name, SLUICE_DTYPE_F32, 2, shape));
  if (num_experts > 1 && sluice_tensor_stride(tensor, 1) != 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: stride of dimension 1 is %lld, want 1: make its rows contiguous",
                       name, (long long)sluice_tensor_stride(tensor, 1));
  }
  return SLUICE_OK;
}

static sluice_status_t check_inputs(const sluice_gate_config_t* c, const sluice_tensor_t* logits,
                                    const sluice_tensor_t* bias) {
  int64_t experts[1] = {c->num_experts};
  SLUICE_TRY(check_rows(logits, "logits", -1, c->num_experts));
  if (logits->shape[0] > INT64_MAX / 64 / c->top_k) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "logits: %lld tokens are more than the gate can count",
                       (long long)logits->shape[0]);
  }
  if (bias == NULL) return SLUICE_OK;
  return sluice_tensor_check(bias, "bias", SLUICE_DTYPE_F32, 1, experts);
}

/* A [T, K] tensor of any strides. */
static sluice_status_t check_routes(const sluice_gate_config_t* c, const sluice_tensor_t* tensor, const char* name,
                                    int32_t dtype, int64_t num_tokens) {
  int64_t shape[2] = {num_tokens, c->top_k};
  return sluice_tensor_check(tensor, name, dtype, 2, shape);
}

static const float* bias_data(const sluice_tensor_t* bias, int64_t* out_stride) {
  *out_stride = bias == NULL ? 0 : sluice_tensor_stride(bias, 0);
  return bias == NULL ? NULL : sluice_tensor_data(bias);
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

/* Temporaries of a call, in one block: [E] each, and one token's choices. */
typedef struct {
  int64_t bytes;
  double* mean;    /* sum over tokens of the scores, normalised */
  int64_t* counts; /* routes per expert before dropping */
  float* scores;
  float* grad; /* towards the scores of one token */
  int32_t* ids;
  sluice_gate_room_t room;
} scratch_t;

static sluice_status_t scratch_create(const sluice_gate_config_t* c, scratch_t* out_scratch) {
  int64_t experts = c->num_experts;
  scratch_t s = {.bytes = experts * (8 + 8 + 4 + 4 + 4)};
  char* base = sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)s.bytes, "gate: scores of a token");
  if (base == NULL) return sluice_alloc_status();
  s.mean = (double*)(void*)base;
  s.counts = (int64_t*)(void*)(base + 8 * experts);
  s.scores = (float*)(void*)(base + 16 * experts);
  s.grad = (float*)(void*)(base + 20 * experts);
  s.ids = (int32_t*)(void*)(base + 24 * experts);
  sluice_status_t status = sluice_gate_room_create(c, &s.room);
  if (status != SLUICE_OK) {
    sluice_free(sluice_process_allocator(), base, (uint64_t)s.bytes);
    return status;
  }
  *out_scratch = s;
  return SLUICE_OK;
}

static void scratch_destroy(scratch_t* s) {
  sluice_gate_room_destroy(&s->room);
  sluice_free(sluice_process_allocator(), s->mean, (uint64_t)s->bytes);
}

/* The sum that turns sigmoid scores into shares; 1 for softmax scores, which are shares already. */
static double share_divisor(const sluice_gate_config_t* c, const float* scores) {
  if (c->score == SLUICE_SCORE_SOFTMAX) return 1;
  double sum = 0;
  for (int32_t e = 0; e < c->num_experts; ++e) sum += (double)scores[e];
  return sum;
}

/* Where all sigmoid scores are 0 the token has no share in any expert. */
static double share(float score, double divisor) { return divisor == 0 ? 0 : (double)score / divisor; }

/* weights[t, :] from the raw scores of the kept routes: divided by their sum, scaled; 0 where dropped or the sum is 0.
 */
static void finish_weights(const sluice_gate_config_t* c, int64_t num_tokens, strided_t ids, strided_t weights) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    double sum = 0, divisor = 1;
    for (int32_t k = 0; k < c->top_k; ++k) {
      if (*id_at(ids, t, k) >= 0) sum += (double)*real_at(weights, t, k);
    }
    if (c->renormalize) divisor = sum;
    for (int32_t k = 0; k < c->top_k; ++k) {
      float* w = real_at(weights, t, k);
      double kept = *id_at(ids, t, k) < 0 || divisor == 0 ? 0 : (double)*w / divisor;
      *w = (float)(kept * (double)c->scaling);
    }
  }
}

/* aux = E * sum over e of (counts[e] / (T K)) * (mean[e] / T) */
static float aux_loss(const sluice_gate_config_t* c, int64_t num_tokens, const scratch_t* s) {
  double sum = 0, tokens = (double)num_tokens;
  if (num_tokens == 0) return 0;
  for (int32_t e = 0; e < c->num_experts; ++e) {
    sum += (double)s->counts[e] / (tokens * c->top_k) * (s->mean[e] / tokens);
  }
  return (float)(c->num_experts * sum);
}

sluice_status_t sluice_gate_forward(const sluice_gate_config_t* config, const sluice_tensor_t* logits,
                                    const sluice_tensor_t* bias, const sluice_tensor_t* expert_ids,
                                    const sluice_tensor_t* route_weights, const sluice_tensor_t* counts,
                                    float* out_aux_loss, float* out_z_loss) {
  sluice_gate_config_t c;
  scratch_t scratch = {0};
  sluice_gate_drop_t drop;
  SLUICE_TRY(sluice_gate_config_read(config, &c));
  SLUICE_TRY(check_inputs(&c, logits, bias));
  int64_t num_tokens = logits->shape[0], bias_stride, experts[1] = {c.num_experts};
  SLUICE_TRY(check_routes(&c, expert_ids, "expert_ids", SLUICE_DTYPE_I32, num_tokens));
  SLUICE_TRY(check_routes(&c, route_weights, "route_weights", SLUICE_DTYPE_F32, num_tokens));
  SLUICE_TRY(sluice_tensor_check_written(expert_ids, "expert_ids"));
  SLUICE_TRY(sluice_tensor_check_written(route_weights, "route_weights"));
  if (counts != NULL) {
    SLUICE_TRY(sluice_tensor_check(counts, "counts", SLUICE_DTYPE_I64, 1, experts));
    SLUICE_TRY(sluice_tensor_check_written(counts, "counts"));
  }
  SLUICE_TRY(scratch_create(&c, &scratch));
  sluice_status_t status = sluice_gate_drop_create(&c, num_tokens, &drop);
  if (status != SLUICE_OK) goto err_destroy_scratch;

  const float* choosing_bias = bias_data(bias, &bias_stride);
  const float* row = sluice_tensor_data(logits);
  int64_t row_stride = sluice_tensor_stride(logits, 0);
  strided_t ids = strided(expert_ids, sizeof(int32_t)), weights = strided(route_weights, sizeof(float));
  double z = 0;
  for (int64_t t = 0; t < num_tokens; ++t, row += row_stride) {
    double lse = sluice_gate_scores(&c, row, scratch.scores);
    z += lse * lse;
    sluice_gate_choose(&c, scratch.scores, choosing_bias, bias_stride, &scratch.room, scratch.ids);
    double divisor = out_aux_loss == NULL ? 1 : share_divisor(&c, scratch.scores);
    for (int32_t e = 0; out_aux_loss != NULL && e < c.num_experts; ++e) {
      scratch.mean[e] += share(scratch.scores[e], divisor);
    }
    for (int32_t k = 0; k < c.top_k; ++k) {
      int32_t e = scratch.ids[k];
      ++scratch.counts[e];
      *id_at(ids, t, k) = e;
      *real_at(weights, t, k) = scratch.scores[e];
      sluice_gate_drop_offer(&drop, t, k, e, scratch.scores[e]);
    }
  }
  sluice_gate_drop_decide(&drop, scratch.counts);
  for (int64_t t = 0; t < num_tokens && drop.capacity < num_tokens; ++t) {
    for (int32_t k = 0; k < c.top_k; ++k) {
      if (!sluice_gate_drop_keeps(&drop, t, k)) *id_at(ids, t, k) = -1;
    }
  }
  finish_weights(&c, num_tokens, ids, weights);
  if (counts != NULL) {
    int64_t* out = sluice_tensor_data(counts);
    for (int32_t e = 0; e < c.num_experts; ++e) out[e * sluice_tensor_stride(counts, 0)] = scratch.counts[e];
  }
  if (out_aux_loss != NULL) *out_aux_loss = aux_loss(&c, num_tokens, &scratch);
  if (out_z_loss != NULL) *out_z_loss = num_tokens == 0 ? 0 : (float)(z / (double)num_tokens);
  sluice_gate_drop_destroy(&drop);
err_destroy_scratch:
  scratch_destroy(&scratch);
  return status;
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static sluice_status_t check_ids(const sluice_gate_config_t* c, int64_t num_tokens, strided_t ids) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int32_t k = 0; k < c->top_k; ++k) {
      int32_t id = *id_at(ids, t, k);
      if (id < -1 || id >= c->num_experts) {
        return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                           "expert_ids[%lld, %d] is %d: want -1 (dropped) to %d, as sluice_gate_forward wrote them",
                           (long long)t, (int)k, (int)id, (int)c->num_experts - 1);
      }
    }
  }
  return SLUICE_OK;
}

/* counts[e] before dropping. Where nothing is dropped they stand in the ids; else the choices are made again. */
static void count_choices(const sluice_gate_config_t* c, int64_t num_tokens, const float* row, int64_t row_stride,
                          const float* bias, int64_t bias_stride, strided_t ids, scratch_t* s) {
  for (int64_t t = 0; t < num_tokens; ++t, row += row_stride) {
    int whole = 1;
    for (int32_t k = 0; k < c->top_k; ++k) whole &= *id_at(ids, t, k) >= 0;
    if (!whole) {
      (void)sluice_gate_scores(c, row, s->scores);
      sluice_gate_choose(c, s->scores, bias, bias_stride, &s->room, s->ids);
    }
    for (int32_t k = 0; k < c->top_k; ++k) ++s->counts[whole ? *id_at(ids, t, k) : s->ids[k]];
  }
}

/* grad[id] += the gradient of the weights towards the scores: with s the kept scores and S their sum,
 *   w_k = scaling * s_k / S:  dL/ds_k = scaling * (g_k - sum over j of g_j s_j / S) / S;   w_k = scaling * s_k without.
 */
static void weights_backward(const sluice_gate_config_t* c, int64_t t, strided_t ids, strided_t grads,
                             const float* scores, float* grad) {
  double sum = 0, dot = 0;
  for (int32_t k = 0; k < c->top_k; ++k) {
    int32_t e = *id_at(ids, t, k);
    if (e < 0) continue;
    sum += (double)scores[e];
    dot += (double)scores[e] * (double)*real_at(grads, t, k);
  }
  for (int32_t k = 0; k < c->top_k; ++k) {
    int32_t e = *id_at(ids, t, k);
    if (e < 0) continue;
    double g = (double)*real_at(grads, t, k);
    if (c->renormalize) g = sum == 0 ? 0 : (g - dot / sum) / sum;
    grad[e] += (float)(g * (double)c->scaling);
  }
}

/* Through the scores to the logits: softmax dl = s (g - sum g s), sigmoid dl = s (1 - s) g. */
static void scores_backward(const sluice_gate_config_t* c, const float* logits, const float* scores, const float* grad,
                            float* out) {
  double dot = 0;
  if (c->score == SLUICE_SCORE_SOFTMAX) {
    for (int32_t e = 0; e < c->num_experts; ++e) dot += (double)grad[e] * (double)scores[e];
    for (int32_t e = 0; e < c->num_experts; ++e) out[e] = (float)((double)scores[e] * ((double)grad[e] - dot));
    return;
  }
  for (int32_t e = 0; e < c->num_experts; ++e) {
    float decay = expf(-fabsf(logits[e]));
    out[e] = grad[e] * (decay / ((1.0f + decay) * (1.0f + decay)));
  }
}

typedef struct {
  const sluice_gate_config_t* config;
  int64_t num_tokens;
  strided_t ids, grads;
  float grad_aux, grad_z;
} backward_t;

/* The whole gradient of one token. */
static void token_backward(const backward_t* b, int64_t t, const float* logits, scratch_t* s, float* out) {
  const sluice_gate_config_t* c = b->config;
  int32_t experts = c->num_experts;
  double tokens = (double)b->num_tokens;
  double lse = sluice_gate_scores(c, logits, s->scores);
  memset(s->grad, 0, (size_t)experts * sizeof *s->grad);
  if (b->grads.data != NULL) weights_backward(c, t, b->ids, b->grads, s->scores, s->grad);
  if (b->grad_aux != 0) {
    /* dL/dp[e] = grad_aux * E * counts[e] / (T K) / T for the shares p; p = s / sum s for sigmoid scores. */
    double divisor = share_divisor(c, s->scores), dot = 0;
    double unit = (double)b->grad_aux * experts / (tokens * c->top_k) / tokens;
    if (c->score == SLUICE_SCORE_SIGMOID) {
      for (int32_t e = 0; e < experts; ++e) dot += (double)s->counts[e] * share(s->scores[e], divisor);
    }
    for (int32_t e = 0; e < experts && divisor != 0; ++e) {
      s->grad[e] += (float)(unit * ((double)s->counts[e] - dot) / divisor);
    }
  }
  scores_backward(c, logits, s->scores, s->grad, out);
  if (b->grad_z != 0) {
    /* d lse^2 / T: 2 lse softmax(logits) / T */
    double unit = (double)b->grad_z * 2 * lse / tokens;
    for (int32_t e = 0; e < experts; ++e) out[e] += (float)(unit * exp((double)logits[e] - lse));
  }
}

sluice_status_t sluice_gate_backward(const sluice_gate_config_t* config, const sluice_tensor_t* logits,
                                     const sluice_tensor_t* bias, const sluice_tensor_t* expert_ids,
                                     const sluice_tensor_t* grad_route_weights, float grad_aux_loss, float grad_z_loss,
                                     const sluice_tensor_t* grad_logits) {
  sluice_gate_config_t c;
  scratch_t scratch = {0};
  SLUICE_TRY(sluice_gate_config_read(config, &c));
  SLUICE_TRY(check_inputs(&c, logits, bias));
  int64_t num_tokens = logits->shape[0], bias_stride;
  SLUICE_TRY(check_routes(&c, expert_ids, "expert_ids", SLUICE_DTYPE_I32, num_tokens));
  if (grad_route_weights != NULL) {
    SLUICE_TRY(check_routes(&c, grad_route_weights, "grad_route_weights", SLUICE_DTYPE_F32, num_tokens));
  }
  SLUICE_TRY(check_rows(grad_logits, "grad_logits", num_tokens, c.num_experts));
  SLUICE_TRY(sluice_tensor_check_written(grad_logits, "grad_logits"));
  strided_t ids = strided(expert_ids, sizeof(int32_t));
  SLUICE_TRY(check_ids(&c, num_tokens, ids));
  SLUICE_TRY(scratch_create(&c, &scratch));

  const float* choosing_bias = bias_data(bias, &bias_stride);
  const float* row = sluice_tensor_data(logits);
  float* out = sluice_tensor_data(grad_logits);
  int64_t row_stride = sluice_tensor_stride(logits, 0), out_stride = sluice_tensor_stride(grad_logits, 0);
  backward_t b = {&c, num_tokens, ids, strided(grad_route_weights, sizeof(float)), grad_aux_loss, grad_z_loss};
  if (grad_aux_loss != 0) {
    count_choices(&c, num_tokens, row, row_stride, choosing_bias, bias_stride, ids, &scratch);
  }
  for (int64_t t = 0; t < num_tokens; ++t) {
    token_backward(&b, t, row + t * row_stride, &scratch, out + t * out_stride);
  }
  scratch_destroy(&scratch);
  return SLUICE_OK;
}
