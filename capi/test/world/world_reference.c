// SPDX-License-Identifier: Apache-2.0
/* The reference: y[t] = sum over k of w * expert(x), with gradients derived by hand, all in f64. */
#include "capi/test/world/world_split.h"

#include <math.h>
#include <stdlib.h>

static double act(int32_t kind, double x) {
  switch (kind) {
    case SLUICE_ACTIVATION_RELU: return x > 0 ? x : 0;
    case SLUICE_ACTIVATION_GELU: return 0.5 * x * (1 + erf(x / sqrt(2)));
    case SLUICE_ACTIVATION_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case SLUICE_ACTIVATION_SILU: return x / (1 + exp(-x));
    case SLUICE_ACTIVATION_RELU2: return x > 0 ? x * x : 0;
    case SLUICE_ACTIVATION_SWIGLU: x = fmin(x, (double)WORLD_LIMIT); return x / (1 + exp(-(double)WORLD_ALPHA * x));
    default: return x;
  }
}

static double act_slope(int32_t kind, double x) {
  double u, s;
  switch (kind) {
    case SLUICE_ACTIVATION_RELU: return x > 0;
    case SLUICE_ACTIVATION_GELU: return 0.5 * (1 + erf(x / sqrt(2))) + x * exp(-x * x / 2) / sqrt(2 * M_PI);
    case SLUICE_ACTIVATION_GELU_TANH:
      u = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
      return 0.5 * (1 + u) + 0.5 * x * (1 - u * u) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    case SLUICE_ACTIVATION_SILU: s = 1 / (1 + exp(-x)); return s * (1 + x * (1 - s));
    case SLUICE_ACTIVATION_RELU2: return x > 0 ? 2 * x : 0;
    case SLUICE_ACTIVATION_SWIGLU:
      s = 1 / (1 + exp(-(double)WORLD_ALPHA * x));
      return x > (double)WORLD_LIMIT ? 0 : s * (1 + (double)WORLD_ALPHA * x * (1 - s));
    default: return 1;
  }
}

/* Returns the factor of the gated product, which is W3 x + b3 except for SWIGLU. */
static double up_value(int32_t kind, double u) {
  if (kind != SLUICE_ACTIVATION_SWIGLU) return u;
  return fmax(-(double)WORLD_LIMIT, fmin(u, (double)WORLD_LIMIT)) + (double)WORLD_OFFSET;
}
static double up_slope(int32_t kind, double u) {
  return kind == SLUICE_ACTIVATION_SWIGLU && fabs(u) > (double)WORLD_LIMIT ? 0 : 1;
}

typedef struct scratch_s {
  double *x, *pre, *gate, *a, *y, *dy, *da;
  double* params[NUM_PARAMS]; /* by kind, for all experts; NULL: not used */
} scratch_t;

static void take_params(const case_t* c, scratch_t* s) {
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    if (c->callback_experts || !world_param_used(c, kind)) continue;
    const int64_t size = world_param_size(c, kind);
    s->params[kind] = calloc((size_t)(c->num_experts * size) + 1, sizeof(double));
    for (int64_t i = 0; i < c->num_experts * size; ++i) {
      s->params[kind][i] = world_param_value(c, kind, (int32_t)(i / size), i % size);
    }
  }
}

static const int linear_of[] = {W1, W3, W2};

/* The kind of the first factor of the adapter of W1, W3 or W2. An adapter may share the first factor of W1's. */
static int first_factor(const case_t* c, int linear) {
  const int own = LA1 + 2 * linear;
  return linear == 1 && !world_param_used(c, LA3) ? LA1 : own;
}

static int has_adapter(const case_t* c, int linear) { return world_param_used(c, LA1 + 2 * linear + 1); }

/* Replaces W by W + s B A, so that a layer without adapters computes the same. */
static void merge_adapters(const case_t* c, const scratch_t* s) {
  for (int linear = 0; linear < 3; ++linear) {
    if (!has_adapter(c, linear)) continue;
    const int a = first_factor(c, linear), b = LA1 + 2 * linear + 1;
    const int64_t rank = world_param_rows(c, a), cols = world_param_cols(c, a), rows = world_param_rows(c, b);
    for (int64_t i = 0; i < c->num_experts * rows; ++i) {
      for (int64_t k = 0; k < rank; ++k) {
        const double factor = (double)world_lora_scale(a) * s->params[b][i * rank + k];
        const double* from = s->params[a] + (i / rows * rank + k) * cols;
        for (int64_t j = 0; j < cols; ++j) s->params[linear_of[linear]][i * cols + j] += factor * from[j];
      }
    }
  }
}

/* dA = s B^T dW, dB = s dW A^T. */
static void split_gradients(const case_t* c, const scratch_t* s, const result_t* out) {
  for (int linear = 0; linear < 3 && c->lora_rank > 0; ++linear) {
    const int a = first_factor(c, linear), b = LA1 + 2 * linear + 1;
    const int64_t rank = world_param_rows(c, a), cols = world_param_cols(c, a), rows = world_param_rows(c, b);
    double* dw = out->grad_params[linear_of[linear]];
    for (int64_t i = 0; has_adapter(c, linear) && i < c->num_experts * rows; ++i) {
      for (int64_t k = 0; k < rank; ++k) {
        const int64_t at = (i / rows * rank + k) * cols;
        for (int64_t j = 0; j < cols; ++j) {
          const double d = (double)world_lora_scale(a) * dw[i * cols + j];
          out->grad_params[a][at + j] += d * s->params[b][i * rank + k];
          out->grad_params[b][i * rank + k] += d * s->params[a][at + j];
        }
      }
    }
    for (int64_t i = 0; i < c->num_experts * world_param_size(c, linear_of[linear]); ++i) dw[i] = 0;
  }
}

/* Computes one row of one expert. In backward, adds to dx and the parameter gradients and returns dy . y. */
static double reference_row(const case_t* c, const scratch_t* s, int32_t e, double weight, double* dx, result_t* out) {
  int64_t M = c->model_width, H = c->hidden_width;
  const double* params[NUM_PARAMS];
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    params[kind] = s->params[kind] == NULL ? NULL : s->params[kind] + e * world_param_size(c, kind);
  }
  const double *w1 = params[W1], *b1 = params[B1], *w2 = params[W2], *b2 = params[B2], *w3 = params[W3],
               *b3 = params[B3];
  for (int64_t h = 0; h < H; ++h) {
    double pre = c->bias ? b1[h] : 0, gate = c->gated && c->bias ? b3[h] : 0;
    for (int64_t m = 0; m < M; ++m) {
      pre += w1[h * M + m] * s->x[m];
      if (c->gated) gate += w3[h * M + m] * s->x[m];
    }
    s->pre[h] = pre, s->gate[h] = gate,
    s->a[h] = act(c->activation, pre) * (c->gated ? up_value(c->activation, gate) : 1), s->da[h] = 0;
  }
  double dot = 0;
  for (int64_t m = 0; m < M; ++m) {
    double y = c->bias ? b2[m] : 0;
    for (int64_t h = 0; h < H; ++h) {
      y += w2[m * H + h] * s->a[h];
      s->da[h] += s->dy[m] * w2[m * H + h];
      out->grad_params[W2][(int64_t)e * M * H + m * H + h] += weight * s->dy[m] * s->a[h];
    }
    s->y[m] = y;
    dot += s->dy[m] * y;
    if (c->bias) out->grad_params[B2][(int64_t)e * M + m] += weight * s->dy[m];
  }
  for (int64_t h = 0; h < H; ++h) {
    double dpre =
        weight * s->da[h] * act_slope(c->activation, s->pre[h]) * (c->gated ? up_value(c->activation, s->gate[h]) : 1);
    double dgate =
        c->gated ? weight * s->da[h] * act(c->activation, s->pre[h]) * up_slope(c->activation, s->gate[h]) : 0;
    for (int64_t m = 0; m < M; ++m) {
      dx[m] += dpre * w1[h * M + m];
      out->grad_params[W1][((int64_t)e * H + h) * M + m] += dpre * s->x[m];
      if (!c->gated) continue;
      dx[m] += dgate * w3[h * M + m];
      out->grad_params[W3][((int64_t)e * H + h) * M + m] += dgate * s->x[m];
    }
    if (c->bias) out->grad_params[B1][(int64_t)e * H + h] += dpre;
    if (c->bias && c->gated) out->grad_params[B3][(int64_t)e * H + h] += dgate;
  }
  return dot;
}

static double toy_row(const case_t* c, const scratch_t* s, int32_t e, double weight, double* dx) {
  double dot = 0;
  for (int64_t m = 0; m < c->model_width; ++m) {
    s->y[m] = s->x[m] * (e + 2);
    dot += s->dy[m] * s->y[m];
    dx[m] += weight * s->dy[m] * (e + 2);
  }
  return dot;
}

void world_reference(const case_t* c, result_t* out) {
  world_make_result(c, out);
  int64_t M = c->model_width, H = c->hidden_width > 0 ? c->hidden_width : 1;
  double* memory = calloc((size_t)(3 * M + 4 * H), sizeof(double));
  scratch_t s = {memory,
                 memory + M,
                 memory + M + H,
                 memory + M + 2 * H,
                 memory + M + 3 * H,
                 memory + 2 * M + 3 * H,
                 memory + 3 * M + 3 * H,
                 {NULL}};
  take_params(c, &s);
  merge_adapters(c, &s);
  for (int kind = 0; kind < NUM_PARAMS && c->accumulate; ++kind) {
    for (int64_t i = 0; i < c->num_experts * world_param_size(c, kind); ++i)
      out->grad_params[kind][i] = world_param_trained(c, kind) ? 1 : 0;
  }
  for (int32_t r = 0; r < c->world_size; ++r) {
    int64_t T = c->tokens[r];
    out->out[r] = calloc((size_t)(T * M) + 1, sizeof(double));
    out->grad_tokens[r] = calloc((size_t)(T * M) + 1, sizeof(double));
    out->grad_weights[r] = calloc((size_t)(T * c->top_k) + 1, sizeof(double));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t m = 0; m < M; ++m) s.x[m] = world_token_value(c, r, t, m), s.dy[m] = world_grad_value(c, r, t, m);
      for (int32_t k = 0; k < c->top_k; ++k) {
        int64_t e = world_expert(c, r, t, k);
        if (e < 0) continue;
        double weight = world_weight_value(c, r, t, k);
        double* dx = out->grad_tokens[r] + t * M;
        double dot = c->callback_experts ? toy_row(c, &s, (int32_t)e, weight, dx)
                                         : reference_row(c, &s, (int32_t)e, weight, dx, out);
        for (int64_t m = 0; m < M; ++m) out->out[r][t * M + m] += weight * s.y[m];
        out->grad_weights[r][t * c->top_k + k] = dot;
      }
    }
  }
  split_gradients(c, &s, out);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) free(s.params[kind]);
  free(memory);
}
