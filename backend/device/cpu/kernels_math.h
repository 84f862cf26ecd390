// SPDX-License-Identifier: Apache-2.0
/* The activations in double, by their equations; infinities give the results of the equations (f(-inf) of GELU and SiLU
 * is NaN, as in PyTorch, so that an overflow stays visible). */
#pragma once

#include <math.h>

#include "backend/device/kernels.h"

#define SLUICE_SQRT_1_2       0.70710678118654752440 /* 1 / sqrt(2) */
#define SLUICE_INV_SQRT_2PI   0.39894228040143267794 /* 1 / sqrt(2 pi) */
#define SLUICE_TWO_SQRT_2_PI  1.59576912160573071176 /* 2 sqrt(2 / pi) */
#define SLUICE_GELU_TANH_CUBE 0.044715

/* 1 / (1 + exp(-x)) without overflow on either side. */
static inline double sluice_sigmoid(double x) {
  double z = exp(-fabs(x));
  return x < 0 ? z / (1 + z) : 1 / (1 + z);
}

/* 2 sqrt(2/pi) (x + 0.044715 x^3): 0.5 (1 + tanh(v / 2)) = sigmoid(v). */
static inline double sluice_gelu_tanh_argument(double x) {
  return SLUICE_TWO_SQRT_2_PI * (x + SLUICE_GELU_TANH_CUBE * x * x * x);
}

/* f(x) */
static inline double sluice_activation_value(int32_t activation, double x) {
  switch (activation) {
    case SLUICE_ACTIVATION_RELU: return x <= 0 ? 0 : x; /* NaN stays NaN */
    case SLUICE_ACTIVATION_GELU: return x * (0.5 * erfc(-x * SLUICE_SQRT_1_2));
    case SLUICE_ACTIVATION_GELU_TANH: return x * sluice_sigmoid(sluice_gelu_tanh_argument(x));
    case SLUICE_ACTIVATION_SILU: return x * sluice_sigmoid(x);
    case SLUICE_ACTIVATION_RELU2: return x <= 0 ? 0 : x * x;
    default: return x;
  }
}

/* f'(x) */
static inline double sluice_activation_slope(int32_t activation, double x) {
  switch (activation) {
    case SLUICE_ACTIVATION_RELU: return x > 0 ? 1 : (x <= 0 ? 0 : x);
    case SLUICE_ACTIVATION_GELU:
      return 0.5 * erfc(-x * SLUICE_SQRT_1_2) + x * (SLUICE_INV_SQRT_2PI * exp(-0.5 * x * x));
    case SLUICE_ACTIVATION_GELU_TANH: {
      double s = sluice_sigmoid(sluice_gelu_tanh_argument(x));
      double t = 1 - s, dv = SLUICE_TWO_SQRT_2_PI * (1 + 3 * SLUICE_GELU_TANH_CUBE * x * x);
      return s + x * (s * t * dv);
    }
    case SLUICE_ACTIVATION_SILU: {
      double s = sluice_sigmoid(x);
      return s + x * (s * (1 - s));
    }
    case SLUICE_ACTIVATION_RELU2: return x <= 0 ? 0 : 2 * x;
    default: return 1;
  }
}

/* f(x), f'(x), v(u), v'(u) of a unit (kernels.h). */
typedef struct {
  double value, slope, up, up_slope;
} sluice_unit_at_t;

static inline sluice_unit_at_t sluice_unit_at(const sluice_unit_t* unit, double x, double u) {
  double limit = unit->limit, alpha = unit->alpha;
  if (unit->activation != SLUICE_ACTIVATION_SWIGLU) {
    return (sluice_unit_at_t){sluice_activation_value(unit->activation, x),
                              sluice_activation_slope(unit->activation, x), u, 1};
  }
  double g = x > limit ? limit : x; /* NaN stays NaN */
  double s = sluice_sigmoid(alpha * g);
  double clamped = u > limit ? limit : (u < -limit ? -limit : u);
  return (sluice_unit_at_t){g * s, x > limit ? 0 : s + alpha * g * (s * (1 - s)), clamped + (double)unit->offset,
                            fabs(u) > limit ? 0 : (isnan(u) ? u : 1)};
}
