// SPDX-License-Identifier: Apache-2.0
/* Errors of the vectorised activations against libm in double, over the whole range of f32.
 *
 * Values are measured in ulps of the exact result, including subnormal results. A slope is a sum of two terms and
 * passes through 0, so its error is measured in ulps of the sum of the magnitudes of its terms (of 2^-119 if that is
 * smaller). The bounds are the largest errors found, rounded up; they hold for the patterns that the stride visits and
 * leave some margin for the others. */
#include <math.h>

#include "backend/device/cpu/kernels_math.h"
#include "backend/device/cpu/kernels_paths.h"
#include "third_party/bazel/test.h"

enum { BATCH = 4096, STRIDE = 1021 /* prime: all exponents, changing mantissas */ };

static double ulp_of(double x) {
  int exponent;
  (void)frexp(fabs(x), &exponent);
  return ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

/* The magnitudes of the two terms of f'(x). */
static double slope_terms(int32_t activation, double x) {
  double s, dv = 1;
  if (activation == SLUICE_ACTIVATION_GELU) {
    return 0.5 * erfc(-x * SLUICE_SQRT_1_2) + fabs(x) * SLUICE_INV_SQRT_2PI * exp(-0.5 * x * x);
  }
  if (activation == SLUICE_ACTIVATION_GELU_TANH) {
    s = sluice_sigmoid(sluice_gelu_tanh_argument(x));
    dv = SLUICE_TWO_SQRT_2_PI * (1 + 3 * SLUICE_GELU_TANH_CUBE * x * x);
  } else {
    s = sluice_sigmoid(x);
  }
  return s + fabs(x) * s * (1 - s) * dv;
}

typedef struct {
  const char* name;
  const sluice_kernels_t* kernels;
  double worst_value, worst_tail, worst_slope; /* tail: below -6, where results are below 1e-8 */
  float at_value, at_tail, at_slope;
} path_t;

/* Error of `got` in units of `unit`; a NaN must match a NaN, an infinity the same infinity. */
static double error_in(double got, double want, double unit) {
  if (isnan(want)) return isnan(got) ? 0 : INFINITY;
  if (isinf((float)want)) return (double)(float)want == got ? 0 : INFINITY;
  return isnan(got) ? INFINITY : fabs(got - want) / unit;
}

static void check_batch(int32_t activation, const float* x, path_t* path, const double* value, const double* slope,
                        const double* terms) {
  static float pre[BATCH], act[BATCH], ones[BATCH], dpre[BATCH], weight[1] = {1}, dweight[1];
  const sluice_unit_t unit = {activation, SLUICE_GATED_NO, 1, 1, 0};
  memcpy(pre, x, sizeof pre);
  for (int i = 0; i < BATCH; ++i) ones[i] = 1;
  path->kernels->unit_forward(NULL, SLUICE_DTYPE_F32, &unit, 1, BATCH, pre, NULL, NULL, act);
  path->kernels->unit_backward(NULL, SLUICE_DTYPE_F32, &unit, 1, BATCH, pre, ones, weight, dpre, NULL, dweight);
  for (int i = 0; i < BATCH; ++i) {
    double e = error_in(act[i], value[i], ulp_of(value[i]));
    if (x[i] < -6) {
      if (e > path->worst_tail) path->worst_tail = e, path->at_tail = x[i];
    } else if (e > path->worst_value) {
      path->worst_value = e, path->at_value = x[i];
    }
    e = error_in(dpre[i], slope[i], ulp_of(fmax(terms[i], 0x1p-119)));
    if (e > path->worst_slope) path->worst_slope = e, path->at_slope = x[i];
  }
}

static void measure(int32_t activation, const char* name, double bound_value, double bound_tail, double bound_slope) {
  path_t paths[3] = {{.name = "avx512", .kernels = sluice_cpu_kernels_avx512()},
                     {.name = "avx2", .kernels = sluice_cpu_kernels_avx2()},
                     {.name = "portable", .kernels = sluice_cpu_kernels_portable()}};
  static float x[BATCH];
  static double value[BATCH], slope[BATCH], terms[BATCH];
  static const uint32_t special[] = {0,           0x80000000u, 0x7f800000u, 0xff800000u,
                                     0x7fc00000u, 0xffc00000u, 1,           0x80000001u};
  uint64_t pattern = 0;
  while (pattern <= UINT32_MAX) {
    for (int i = 0; i < BATCH; ++i, pattern += STRIDE) {
      uint32_t bits = pattern > UINT32_MAX ? special[i % 8] : (uint32_t)pattern;
      memcpy(&x[i], &bits, sizeof bits);
      /* Half of the patterns are below 2^-63 or above 2^64, where f(x) is x/2, x or 0: a few of them suffice. */
      uint32_t exponent = (bits >> 23) & 0xff;
      if ((exponent < 90 || exponent > 135) && i % 16 != 0) pattern += (uint64_t)STRIDE * 16;
      value[i] = sluice_activation_value(activation, x[i]);
      slope[i] = sluice_activation_slope(activation, x[i]);
      terms[i] = slope_terms(activation, x[i]);
    }
    for (int p = 0; p < 3; ++p) {
      if (paths[p].kernels != NULL) check_batch(activation, x, &paths[p], value, slope, terms);
    }
  }
  for (int p = 0; p < 3; ++p) {
    if (paths[p].kernels == NULL) {
      print_message("%-9s %-8s skipped: this processor lacks it\n", name, paths[p].name);
      continue;
    }
    print_message("%-9s %-8s value %.2f ulp at %.9g, below -6: %.2f at %.9g; slope %.2f at %.9g\n", name, paths[p].name,
                  paths[p].worst_value, (double)paths[p].at_value, paths[p].worst_tail, (double)paths[p].at_tail,
                  paths[p].worst_slope, (double)paths[p].at_slope);
    assert_true(paths[p].worst_value <= bound_value);
    assert_true(paths[p].worst_tail <= bound_tail);
    assert_true(paths[p].worst_slope <= bound_slope);
  }
}

TEST(Gelu_WholeRange_WithinStatedUlps) { measure(SLUICE_ACTIVATION_GELU, "gelu", 3, 8, 3); }

TEST(GeluTanh_WholeRange_WithinStatedUlps) { measure(SLUICE_ACTIVATION_GELU_TANH, "gelu_tanh", 2.5, 2.5, 4.5); }

TEST(Silu_WholeRange_WithinStatedUlps) { measure(SLUICE_ACTIVATION_SILU, "silu", 2.5, 2.5, 4.5); }
