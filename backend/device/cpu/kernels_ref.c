// SPDX-License-Identifier: Apache-2.0
/* The plain row kernels: each loop follows its equation, for every dtype.
 *
 * Elements are read into double. `rounded` then makes every operation the layer's arithmetic: f32 for f32, bf16 and f16
 * (a sum or product of two floats in double, rounded to float, is exactly the f32 operation), f64 for f64. Activations
 * are evaluated in double and then rounded. */
#include "backend/device/kernels.h"

#include <math.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/device/cpu/kernels_math.h"

static double load(int32_t dtype, const void* data, int64_t i) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: return ((const float*)data)[i];
    case SLUICE_DTYPE_BF16: return sluice_bf16_to_f32(((const uint16_t*)data)[i]);
    case SLUICE_DTYPE_F16: return sluice_f16_to_f32(((const uint16_t*)data)[i]);
    default: return ((const double*)data)[i];
  }
}

static void store(int32_t dtype, void* data, int64_t i, double x) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: ((float*)data)[i] = (float)x; break;
    case SLUICE_DTYPE_BF16: ((uint16_t*)data)[i] = sluice_f32_to_bf16((float)x); break;
    case SLUICE_DTYPE_F16: ((uint16_t*)data)[i] = sluice_f32_to_f16((float)x); break;
    default: ((double*)data)[i] = x; break;
  }
}

/* Returns the result of one operation in the layer's arithmetic. */
static double rounded(int32_t dtype, double x) { return dtype == SLUICE_DTYPE_F64 ? x : (double)(float)x; }

/* Returns the result of a store followed by a load. */
static double through(int32_t dtype, double x) {
  uint64_t cell = 0;
  store(dtype, &cell, 0, x);
  return load(dtype, &cell, 0);
}

/* ---- moving rows ---------------------------------------------------------------------------------------------- */

/* dst[i, :] = src[index[i], :] */
static void gather_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                        int64_t src_stride, const int32_t* index, void* dst) {
  (void)stream;
  size_t bytes = sluice_dtype_bytes(dtype);
  if (width == 0) return;
  for (int64_t i = 0; i < rows; ++i) {
    char* to = (char*)dst + (size_t)(i * width) * bytes;
    if (index[i] < 0) {
      memset(to, 0, (size_t)width * bytes);
    } else {
      memcpy(to, (const char*)src + (size_t)(index[i] * src_stride) * bytes, (size_t)width * bytes);
    }
  }
}

/* dst[i] = src[t, k] with route[i] = (t, k); out[t, k] = rows[position[t, k]] */
static void gather_scalars(sluice_stream_t stream, int64_t count, int64_t top_k, const float* src, int64_t src_t,
                           int64_t src_k, const int32_t* route, float* dst) {
  (void)stream;
  for (int64_t i = 0; i < count; ++i) {
    dst[i] = route[i] < 0 ? 0.0f : src[route[i] / top_k * src_t + route[i] % top_k * src_k];
  }
}

static void spread_scalars(sluice_stream_t stream, int64_t num_tokens, int64_t top_k, const float* rows,
                           const int32_t* position, float* out, int64_t out_t, int64_t out_k) {
  (void)stream;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      int32_t row = position[t * top_k + k];
      out[t * out_t + k * out_k] = row < 0 ? 0.0f : rows[row];
    }
  }
}

/* dst[dst_row + i, :] = src[src_row + i, :], i in [0, rows) */
static void move_rows(sluice_stream_t stream, int64_t row_bytes, const sluice_row_run_t* runs, int64_t num_runs,
                      const void* src, void* dst) {
  (void)stream;
  for (int64_t r = 0; r < num_runs; ++r) {
    if (runs[r].rows == 0 || row_bytes == 0) continue;
    memcpy((char*)dst + runs[r].dst_row * row_bytes, (const char*)src + runs[r].src_row * row_bytes,
           (size_t)(runs[r].rows * row_bytes));
  }
}

/* out[t, j] = sum over k of scale[t, k] * rows[position[t, k], j] */
static void combine_rows(sluice_stream_t stream, int32_t dtype, int64_t num_tokens, int64_t top_k, int64_t width,
                         const void* rows, const int32_t* position, const float* scale, int64_t scale_t,
                         int64_t scale_k, void* out, int64_t out_stride) {
  (void)stream;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t j = 0; j < width; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < top_k; ++k) {
        int64_t row = position[t * top_k + k];
        if (row < 0) continue;
        double s = scale == NULL ? 1.0 : (double)scale[t * scale_t + k * scale_k];
        sum = rounded(dtype, sum + rounded(dtype, s * load(dtype, rows, row * width + j)));
      }
      store(dtype, out, t * out_stride + j, sum);
    }
  }
}

/* dst[i, j] = weight[i] * src[i, j] */
static void scale_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                       const float* weight, void* dst) {
  (void)stream;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      store(dtype, dst, i * width + j, (double)weight[i] * load(dtype, src, i * width + j));
    }
  }
}

/* data[i, j] += bias[j] */
static void add_bias(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, void* data, const void* bias) {
  (void)stream;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      store(dtype, data, i * width + j, load(dtype, data, i * width + j) + load(dtype, bias, j));
    }
  }
}

/* ---- sums ----------------------------------------------------------------------------------------------------- */

/* The order of a sum along a row: partial sums, element j in partial j mod their number, folded by halves. Vector
 * registers of any width up to 32 can keep this order, and so can lanes that sum eight adjacent columns, so all
 * versions give the same bits. */
enum { PARTIALS = 32, UNIT_PARTIALS = 256 };

static void partial_add(int32_t dtype, double* partial, int64_t j, double problem) {
  partial[j] = rounded(dtype, partial[j] + problem);
}

static double partial_fold(int32_t dtype, double* partial, int number) {
  for (int half = number / 2; half > 0; half /= 2) {
    for (int p = 0; p < half; ++p) partial[p] = rounded(dtype, partial[p] + partial[p + half]);
  }
  return partial[0];
}

/* out[i] (+)= sum over j of a[i, j] * b[i or 0, j] */
static void dot_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* a, const void* b,
                     int64_t b_stride, int32_t accumulate, float* out) {
  (void)stream;
  for (int64_t i = 0; i < rows; ++i) {
    double partial[PARTIALS] = {0};
    for (int64_t j = 0; j < width; ++j) {
      partial_add(dtype, partial, j % PARTIALS,
                  rounded(dtype, load(dtype, a, i * width + j) * load(dtype, b, i * b_stride + j)));
    }
    out[i] = (float)((accumulate ? (double)out[i] : 0.0) + partial_fold(dtype, partial, PARTIALS));
  }
}

/* out[j] (+)= sum over i of weight[i] * data[i, j], starting from out[j] */
static void sum_columns(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* data,
                        int64_t data_stride, const float* weight, int32_t accumulate, int32_t dtype_out, void* out) {
  (void)stream;
  for (int64_t j = 0; j < width; ++j) {
    double sum = accumulate ? rounded(dtype, load(dtype_out, out, j)) : 0.0;
    for (int64_t i = 0; i < rows; ++i) {
      double w = weight == NULL ? 1.0 : (double)weight[i];
      sum = rounded(dtype, sum + rounded(dtype, w * load(dtype, data, i * data_stride + j)));
    }
    store(dtype_out, out, j, sum);
  }
}

/* out[i, :] (+)= sums[i, :] */
static void round_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const float* sums,
                       int32_t accumulate, void* out, int64_t out_stride) {
  (void)stream;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      double before = accumulate ? load(dtype, out, i * out_stride + j) : 0.0;
      store(dtype, out, i * out_stride + j, rounded(dtype, before + (double)sums[i * width + j]));
    }
  }
}

/* ---- activations ---------------------------------------------------------------------------------------------- */

/* The columns of x and u in a row of pre. */
typedef struct {
  int64_t step, up;
} places_t;

static places_t places_of(const sluice_unit_t* unit, int64_t hidden) {
  return unit->gated == SLUICE_GATED_INTERLEAVED ? (places_t){2, 1} : (places_t){1, hidden};
}

/* pre += bias, rounded; act = f(x), gated: f(x) v(u) */
static void unit_forward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows, int64_t hidden,
                         void* pre, const void* b1, const void* b3, void* act) {
  (void)stream;
  int64_t width = unit->gated ? 2 * hidden : hidden;
  places_t at = places_of(unit, hidden);
  const void* b_up = unit->gated == SLUICE_GATED_INTERLEAVED ? b1 : b3;
  int64_t up_step = unit->gated == SLUICE_GATED_INTERLEAVED ? 2 : 1, up_first = up_step - 1;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < hidden; ++h) {
      int64_t at1 = i * width + at.step * h, at3 = at1 + at.up;
      if (b1 != NULL) store(dtype, pre, at1, load(dtype, pre, at1) + load(dtype, b1, at.step * h));
      if (unit->gated && b_up != NULL) {
        store(dtype, pre, at3, load(dtype, pre, at3) + load(dtype, b_up, up_first + up_step * h));
      }
      sluice_unit_at_t u = sluice_unit_at(unit, load(dtype, pre, at1), unit->gated ? load(dtype, pre, at3) : 1);
      double f = rounded(dtype, u.value);
      store(dtype, act, i * hidden + h, unit->gated ? f * rounded(dtype, u.up) : f);
    }
  }
}

/* With a = act as forward stored it:
 *   dx = weight * dact * f'(x) [* v(u)],   du = weight * dact * f(x) * v'(u)
 *   act_w = weight * a,                    dweight = sum over h of dact * a */
static void unit_backward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows,
                          int64_t hidden, const void* pre, const void* dact, const float* weight, void* dpre,
                          void* act_w, float* dweight) {
  (void)stream;
  int64_t width = unit->gated ? 2 * hidden : hidden;
  places_t at = places_of(unit, hidden);
  for (int64_t i = 0; i < rows; ++i) {
    double partial[UNIT_PARTIALS] = {0};
    double w = weight[i];
    for (int64_t h = 0; h < hidden; ++h) {
      int64_t at1 = i * width + at.step * h, at3 = at1 + at.up;
      sluice_unit_at_t u = sluice_unit_at(unit, load(dtype, pre, at1), unit->gated ? load(dtype, pre, at3) : 1);
      double d = load(dtype, dact, i * hidden + h);
      double f = rounded(dtype, u.value), up = unit->gated ? rounded(dtype, u.up) : 1.0;
      double slope = rounded(dtype, u.slope);
      double a = through(dtype, f * up);
      partial_add(dtype, partial, h % UNIT_PARTIALS, rounded(dtype, d * a));
      double wd = rounded(dtype, w * d);
      store(dtype, dpre, at1, rounded(dtype, wd * up) * slope);
      if (unit->gated) store(dtype, dpre, at3, rounded(dtype, wd * f) * u.up_slope);
      if (act_w != NULL) store(dtype, act_w, i * hidden + h, w * a);
    }
    dweight[i] = (float)partial_fold(dtype, partial, UNIT_PARTIALS);
  }
}

const sluice_kernels_t* sluice_cpu_kernels_ref(void) {
  static const sluice_kernels_t kernels = {
      .gather_rows = gather_rows,
      .move_rows = move_rows,
      .combine_rows = combine_rows,
      .add_bias = add_bias,
      .dot_rows = dot_rows,
      .sum_columns = sum_columns,
      .round_rows = round_rows,
      .scale_rows = scale_rows,
      .unit_forward = unit_forward,
      .unit_backward = unit_backward,
      .gather_scalars = gather_scalars,
      .spread_scalars = spread_scalars,
  };
  return &kernels;
}
