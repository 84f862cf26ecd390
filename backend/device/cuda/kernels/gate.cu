// SPDX-License-Identifier: Apache-2.0
/* The gate: scores of one token's logits, the K best with ties to the lower id, and weights. Semantics as in
 * backend/gate (gate_choice.c, finish_weights); sums of scores run in f64 in another order. */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

enum { SCORE_SOFTMAX = 0 };

/* Returns whether (a, at) comes before (b, bt): greater first, a NaN below every number, equal ones by id. at < 0: no
 * choice. */
SLUICE_FN bool comes_before(float a, int32_t at, float b, int32_t bt) {
  if (at < 0 || bt < 0) return at >= 0;
  const bool a_nan = a != a, b_nan = b != b;
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a != b) return a > b;
  return at < bt;
}

struct choice_t {
  float value;
  int32_t at;
};

SLUICE_FN choice_t warp_best(per_lane<float> value, per_lane<int32_t> at) {
  for (int half = 16; half > 0; half /= 2) {
    per_lane<float> v = warp_down(value, half);
    per_lane<int32_t> i = warp_down(at, half);
    SLUICE_LANES(l) {
      if (comes_before(v[l], i[l], value[l], at[l])) {
        value[l] = v[l];
        at[l] = i[l];
      }
    }
  }
  choice_t best = {warp_get(value, 0), warp_get(at, 0)};
  return best;
}

SLUICE_FN float score_of(const sluice_gate_kernel_args_t& a, float logit, float greatest, double sum) {
  if (a.score == SCORE_SOFTMAX) return (float)((double)expf(logit - greatest) / sum);
  const float z = expf(-fabsf(logit));
  return (logit < 0 ? z : 1.0f) / (1.0f + z);
}

SLUICE_FN void gate_top_k(const sluice_gate_kernel_args_t& a, int64_t t) {
  const float* logits = a.logits + t * a.logits_stride;
  float greatest = 0;
  double sum = 1;
  if (a.score == SCORE_SOFTMAX) {
    per_lane<float> value;
    per_lane<int32_t> at;
    SLUICE_LANES(lane) {
      value[lane] = 0;
      at[lane] = -1;
      for (int64_t e = lane; e < a.num_experts; e += 32) {
        if (comes_before(logits[e], (int32_t)e, value[lane], at[lane])) {
          value[lane] = logits[e];
          at[lane] = (int32_t)e;
        }
      }
    }
    greatest = warp_best(value, at).value;
    per_lane<double> partial;
    SLUICE_LANES(lane) {
      partial[lane] = 0;
      for (int64_t e = lane; e < a.num_experts; e += 32) partial[lane] += (double)expf(logits[e] - greatest);
    }
    sum = warp_fold(partial);
  }
  /* The k-th choice is the best of those that come after the previous choice, so no set has to be stored. */
  choice_t last = {0, -1};
  double kept = 0;
  for (int64_t k = 0; k < a.top_k; ++k) {
    per_lane<float> value;
    per_lane<int32_t> at;
    SLUICE_LANES(lane) {
      value[lane] = 0;
      at[lane] = -1;
      for (int64_t e = lane; e < a.num_experts; e += 32) {
        const float s = score_of(a, logits[e], greatest, sum) + (a.bias == NULL ? 0.0f : a.bias[e]);
        const bool later = last.at < 0 || comes_before(last.value, last.at, s, (int32_t)e);
        if (later && comes_before(s, (int32_t)e, value[lane], at[lane])) {
          value[lane] = s;
          at[lane] = (int32_t)e;
        }
      }
    }
    last = warp_best(value, at);
    const float raw = score_of(a, logits[last.at], greatest, sum);
    kept += (double)raw;
    SLUICE_LANES(lane) {
      if (lane == 0) {
        a.ids[t * a.ids_t + k * a.ids_k] = last.at;
        a.weights[t * a.weights_t + k * a.weights_k] = raw;
      }
    }
  }
  warp_fence();
  const double divisor = a.renormalize ? kept : 1;
  SLUICE_LANES(lane) {
    for (int64_t k = lane; k < a.top_k; k += 32) {
      float* w = &a.weights[t * a.weights_t + k * a.weights_k];
      *w = (float)((divisor == 0 ? 0 : (double)*w / divisor) * (double)a.scaling);
    }
  }
}
SLUICE_KERNEL(gate_top_k, sluice_gate_kernel_args_t)
