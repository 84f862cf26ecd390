// SPDX-License-Identifier: Apache-2.0
/* Activations and gated activations, with bias; the equations of backend/device/cpu/kernels_math.h in the layer's
 * arithmetic (f32 for f32, bf16 and f16). A kernel for each activation and dtype, so that its loop has no switch. */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

enum { IDENTITY = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4, RELU2 = 5, SWIGLU = 6 }; /* SLUICE_ACTIVATION_* */
enum { UNGATED = 0, HALVES = 1, INTERLEAVED = 2 };                                         /* SLUICE_GATED_* */
enum { NEIGHBOURS = 8 }; /* adjacent columns per lane: 16 bytes of 16-bit types */

/* ---- a unit at one column ---- */

SLUICE_FN float fused(float a, float b, float c) { return fmaf(a, b, c); }
SLUICE_FN double fused(double a, double b, double c) { return fma(a, b, c); }
SLUICE_FN float within(float x, float limit) { return fmaxf(fminf(x, limit), -limit); } /* NaN: limit */
SLUICE_FN double within(double x, double limit) { return fmax(fmin(x, limit), -limit); }

/* Approximate instructions of the GPU, accurate to two units in the last place, and minimum and maximum that propagate
 * NaN. */
#if defined(__CUDACC__)
#define SLUICE_BY_ONE_INSTRUCTION(name, text) \
  SLUICE_FN float name(float x) {             \
    float y;                                  \
    asm(text " %0, %1;" : "=f"(y) : "f"(x));  \
    return y;                                 \
  }
#define SLUICE_OF_TWO_BY_ONE_INSTRUCTION(name, text)         \
  SLUICE_FN float name(float x, float limit) {               \
    float y;                                                 \
    asm(text " %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit)); \
    return y;                                                \
  }
SLUICE_BY_ONE_INSTRUCTION(power_of_two, "ex2.approx.ftz.f32")
SLUICE_BY_ONE_INSTRUCTION(inverse_of, "rcp.approx.ftz.f32")
SLUICE_OF_TWO_BY_ONE_INSTRUCTION(least_of, "min.NaN.f32")
SLUICE_OF_TWO_BY_ONE_INSTRUCTION(most_of, "max.NaN.f32")
#else
SLUICE_FN float power_of_two(float x) { return exp2f(x); }
SLUICE_FN float inverse_of(float x) { return 1 / x; }
SLUICE_FN float least_of(float x, float limit) { return x > limit ? limit : x; }
SLUICE_FN float most_of(float x, float limit) { return x < limit ? limit : x; }
#endif
SLUICE_FN double least_of(double x, double limit) { return x > limit ? limit : x; }
SLUICE_FN double most_of(double x, double limit) { return x < limit ? limit : x; }

/* Evaluates exp(-x) and exp(-x^2 / 2). For 16-bit types, rounding of the argument may change the last digits of
 * the exponential (relative 1e-6 at e^-15); for f32 the argument is two floats, at most 126 in magnitude. Too large
 * values become infinite, and 0 when inverted. */
template <typename E>
struct exponentials {
  static SLUICE_MEMBER float decay(float x) { return power_of_two(x * -1.44269504f); }
  static SLUICE_MEMBER float bell(float square) { return power_of_two(square * -0.721347520f); }
  static SLUICE_MEMBER float inverse(float x) { return inverse_of(x); }
};
template <>
struct exponentials<f32_type> {
  static SLUICE_MEMBER float decay(float x) { return of_two_floats(within(x, 126.0f), -1.44269504f); }
  static SLUICE_MEMBER float bell(float square) { return of_two_floats(square, -0.721347520f); }
  static SLUICE_MEMBER float inverse(float x) { return inverse_of(x); }
  static SLUICE_MEMBER float of_two_floats(float x, float log2) {
    const float w = x * log2, rest = fmaf(x, log2, -w);
    return power_of_two(w) * fmaf(rest, 0.693147182f, 1.0f);
  }
};
template <>
struct exponentials<f64_type> {
  static SLUICE_MEMBER double decay(double x) { return exp(-x); }
  static SLUICE_MEMBER double bell(double square) { return exp(-0.5 * square); }
  static SLUICE_MEMBER double inverse(double x) { return 1 / x; }
};

/* 1 / (1 + exp(-x)) */
template <typename E>
SLUICE_FN typename E::value sigmoid_of(typename E::value x) {
  return exponentials<E>::inverse(1 + exponentials<E>::decay(x));
}

/* f(x) and f'(x). */
template <typename V>
struct both_t {
  V value, slope;
};

/* P(q) of gelu_of: minimax, to 1e-7, and for 16-bit types to 1e-6. */
SLUICE_FN float tail_of(const f32_type*, float q) {
  float p = 5.35431391e-5f;
  p = fmaf(p, q, 1.15423347e-4f);
  p = fmaf(p, q, -3.39490041e-4f);
  p = fmaf(p, q, -9.83768958e-4f);
  p = fmaf(p, q, 2.9046312e-3f);
  p = fmaf(p, q, 6.13212632e-3f);
  p = fmaf(p, q, -4.62133251e-2f);
  p = fmaf(p, q, 0.123225018f);
  p = fmaf(p, q, -0.206402615f);
  return fmaf(p, q, 0.121513948f);
}
SLUICE_FN float tail_of(const void*, float q) {
  float p = -3.16158694e-4f;
  p = fmaf(p, q, -8.53660807e-4f);
  p = fmaf(p, q, 2.90752272e-3f);
  p = fmaf(p, q, 6.08319975e-3f);
  p = fmaf(p, q, -4.62135822e-2f);
  p = fmaf(p, q, 0.123231091f);
  p = fmaf(p, q, -0.206402838f);
  return fmaf(p, q, 0.121513836f);
}

/* x times Phi(x), the normal distribution. Its tail beyond a = |x| is P(q) exp(-a^2 / 2) with q = (a - 3) / (a + 3). */
template <typename E>
SLUICE_FN both_t<float> gelu_of(float x) {
  const float a = fminf(fabsf(x), 15.0f); /* 15 times the tail beyond 15 is 0 */
  const float q = (a - 3) * inverse_of(a + 3), bell = exponentials<E>::bell(a * a);
  const float tail = tail_of((const E*)0, q) * bell, below = x < 0 ? tail : 1 - tail;
  return {x * below, fmaf(x, 0.398942280f * bell, below)};
}
template <typename E>
SLUICE_FN both_t<double> gelu_of(double x) {
  const double below = 0.5 * erfc(-x * 0.70710678118654752440);
  return {x * below, below + x * (0.39894228040143267794 * exp(-0.5 * x * x))};
}

template <int A, typename E>
SLUICE_FN both_t<typename E::value> activation_of(typename E::value x) {
  typedef typename E::value value;
  if (A == RELU) { /* NaN stays NaN */
    const value kept = x <= 0 ? 0 : x;
    return {kept, x > 0 ? 1 : kept};
  }
  if (A == RELU2) return {x <= 0 ? 0 : x * x, x <= 0 ? 0 : 2 * x};
  if (A == GELU) return gelu_of<E>(x);
  if (A == GELU_TANH) { /* beyond 11 both are constant, except for the factor x */
    const value near = within(x, (value)11), square = near * near;
    const value twice = (value)1.59576912160573071176, cube = twice * (value)0.044715;
    const value s = sigmoid_of<E>(near * fused(cube, square, twice));
    return {x * s, fused(x, fused(-s, s, s) * fused(3 * cube, square, twice), s)};
  }
  if (A == SILU) {
    const value s = sigmoid_of<E>(x);
    return {x * s, fused(x, fused(-s, s, s), s)};
  }
  return {x, 1};
}

/* f(x), f'(x), v(u), v'(u) of a unit (kernels.h). */
template <typename V>
struct unit_at_t {
  V value, slope, up, up_slope;
};

template <int A, typename E, typename Args>
SLUICE_FN unit_at_t<typename E::value> unit_at(const Args& a, typename E::value x, typename E::value u) {
  typedef typename E::value value;
  if (A != SWIGLU) {
    const both_t<value> f = activation_of<A, E>(x);
    return {f.value, f.slope, u, 1};
  }
  const value limit = (value)a.limit, alpha = (value)a.alpha;
  const value g = least_of(x, limit), clamped = most_of(least_of(u, limit), -limit);
  const value s = sigmoid_of<E>(alpha * g);
  return {g * s, x > limit ? (value)0 : fused(alpha, g * fused(-s, s, s), s),      /* alpha g may be infinite */
          clamped + (value)a.offset, clamped == u ? (value)1 : clamped - clamped}; /* 0, or NaN */
}

/* ---- eight columns ---- */

/* Packed for memory: 16 bytes of 16-bit types, 32 of f32. */
template <typename E>
struct words_t {
  enum { N = (int)(NEIGHBOURS * sizeof(typename E::stored) / sizeof(uint32_t)) };
  uint32_t w[N];
};

struct columns_t {
  float x[NEIGHBOURS];
};

/* Two elements and their word. The GPU's own conversions round as E::put does, but map every NaN to the same one. */
SLUICE_FN void get_two(const f32_type*, const uint32_t* w, float* x) { x[0] = float_of(w[0]), x[1] = float_of(w[1]); }
SLUICE_FN void put_two(const f32_type*, const float* x, uint32_t* w) { w[0] = bits_of(x[0]), w[1] = bits_of(x[1]); }
SLUICE_FN void get_two(const bf16_type*, const uint32_t* w, float* x) {
  x[0] = float_of(w[0] << 16), x[1] = float_of(w[0] & 0xffff0000u);
}
#if defined(__CUDACC__)
SLUICE_FN void put_two(const bf16_type*, const float* x, uint32_t* w) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[0]) : "f"(x[1]), "f"(x[0]));
}
SLUICE_FN void get_two(const f16_type*, const uint32_t* w, float* x) {
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(x[0]), "=f"(x[1])
      : "r"(w[0]));
}
SLUICE_FN void put_two(const f16_type*, const float* x, uint32_t* w) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[0]) : "f"(x[1]), "f"(x[0]));
}
#else
SLUICE_FN void put_two(const bf16_type*, const float* x, uint32_t* w) {
  w[0] = bf16_type::put(x[0]) | (uint32_t)bf16_type::put(x[1]) << 16;
}
SLUICE_FN void get_two(const f16_type*, const uint32_t* w, float* x) {
  x[0] = f16_type::get((uint16_t)w[0]), x[1] = f16_type::get((uint16_t)(w[0] >> 16));
}
SLUICE_FN void put_two(const f16_type*, const float* x, uint32_t* w) {
  w[0] = f16_type::put(x[0]) | (uint32_t)f16_type::put(x[1]) << 16;
}
#endif

template <typename E>
SLUICE_FN columns_t get_columns(const words_t<E>& words) {
  columns_t c;
  SLUICE_UNROLL
  for (int v = 0; v < NEIGHBOURS; v += 2) get_two((const E*)0, words.w + v * words_t<E>::N / NEIGHBOURS, c.x + v);
  return c;
}
template <typename E>
SLUICE_FN words_t<E> put_columns(const columns_t& c) {
  words_t<E> words;
  SLUICE_UNROLL
  for (int v = 0; v < NEIGHBOURS; v += 2) put_two((const E*)0, c.x + v, words.w + v * words_t<E>::N / NEIGHBOURS);
  return words;
}

struct alignas(16) sixteen_t {
  uint32_t w[4];
} SLUICE_MAY_ALIAS;

/* Loads columns h to h + 7 of a row that is aligned to 16 bytes. */
template <typename E>
SLUICE_FN words_t<E> load_words(const void* row, int h) {
  const sixteen_t* from = (const sixteen_t*)((const typename E::stored*)row + h);
  words_t<E> words;
  SLUICE_UNROLL
  for (int q = 0; q < words_t<E>::N / 4; ++q) {
    const sixteen_t quad = from[q];
    SLUICE_UNROLL
    for (int i = 0; i < 4; ++i) words.w[4 * q + i] = quad.w[i];
  }
  return words;
}
template <typename E>
SLUICE_FN void store_words(void* row, int h, const words_t<E>& words) {
  sixteen_t* to = (sixteen_t*)((typename E::stored*)row + h);
  SLUICE_UNROLL
  for (int q = 0; q < words_t<E>::N / 4; ++q) {
    sixteen_t quad;
    SLUICE_UNROLL
    for (int i = 0; i < 4; ++i) quad.w[i] = words.w[4 * q + i];
    to[q] = quad;
  }
}

/* Loads x and u of eight columns from a row of pre: from two halves, or interleaved. */
template <typename E, int G>
SLUICE_FN void load_both(const void* pre, int hidden, int h, columns_t* x, columns_t* u) {
  const words_t<E> one = load_words<E>(pre, G == INTERLEAVED ? 2 * h : h);
  words_t<E> two = one;
  if (G != UNGATED) two = load_words<E>(pre, G == INTERLEAVED ? 2 * h + NEIGHBOURS : hidden + h);
  *x = get_columns<E>(one), *u = get_columns<E>(two);
  if (G != INTERLEAVED) return;
  const columns_t low = *x, high = *u;
  SLUICE_UNROLL
  for (int v = 0; v < NEIGHBOURS / 2; ++v) {
    x->x[v] = low.x[2 * v], u->x[v] = low.x[2 * v + 1];
    x->x[NEIGHBOURS / 2 + v] = high.x[2 * v], u->x[NEIGHBOURS / 2 + v] = high.x[2 * v + 1];
  }
}
template <typename E, int G>
SLUICE_FN void store_both(void* pre, int hidden, int h, const columns_t& x, const columns_t& u) {
  columns_t one = x, two = u;
  SLUICE_UNROLL
  for (int v = 0; G == INTERLEAVED && v < NEIGHBOURS / 2; ++v) {
    one.x[2 * v] = x.x[v], one.x[2 * v + 1] = u.x[v];
    two.x[2 * v] = x.x[NEIGHBOURS / 2 + v], two.x[2 * v + 1] = u.x[NEIGHBOURS / 2 + v];
  }
  store_words<E>(pre, G == INTERLEAVED ? 2 * h : h, put_columns<E>(one));
  if (G != UNGATED) {
    store_words<E>(pre, G == INTERLEAVED ? 2 * h + NEIGHBOURS : hidden + h, put_columns<E>(two));
  }
}

/* ---- rows of experts ---- */

/* The place of row `unit` of a call: its expert, found by bisection, and the row in tensors of a chunk. */
struct place_t {
  int64_t row, first; /* the row in the chunk; the first row of its expert */
  int64_t shift;
  const void *b1, *b3;
};

SLUICE_FN place_t place_of(const sluice_unit_rows_t& rows, int64_t unit) {
  int low = 0, high = rows.num_experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (rows.experts[middle].end > unit) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const sluice_unit_expert_t& e = rows.experts[low];
  return {unit, low > 0 ? rows.experts[low - 1].end : 0, e.shift, e.b1, e.b3};
}

/* Returns the row of a tensor with rows of `width` elements; NULL stays NULL. */
template <typename E>
SLUICE_FN char* row_of(const sluice_unit_rows_t& rows, const place_t& at, int tensor, const void* data, int64_t width) {
  const int64_t shift = rows.by_pass >> tensor & 1 ? at.shift : 0;
  const int64_t skipped = (at.first + shift) * rows.skipped[tensor];
  return data == NULL ? NULL : (char*)((typename E::stored*)data + (at.row + shift) * width) + skipped;
}

/* ---- rows aligned to 16 bytes: a kernel for each activation, without switches in its loop ---- */

/* pre += bias, rounded; act = f(x), gated: f(x) v(u). */
template <typename E, int A, int G>
SLUICE_FN void forward_row(const sluice_act_forward_args_t& a, const place_t& at) {
  char* pre = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_PRE, a.pre, G == UNGATED ? a.hidden : 2 * a.hidden);
  char* row = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_ACT, a.act, a.hidden);
  const int hidden = (int)a.hidden;
  SLUICE_LANES(lane) {
    SLUICE_ONE_BY_ONE
    for (int h = lane * NEIGHBOURS; h < hidden; h += 32 * NEIGHBOURS) {
      columns_t x, u, act;
      load_both<E, G>(pre, hidden, h, &x, &u);
      if (at.b1 != NULL || at.b3 != NULL) {
        columns_t b1 = {}, b3 = {};
        if (G == INTERLEAVED) {
          load_both<E, G>(at.b1, hidden, h, &b1, &b3);
        } else {
          if (at.b1 != NULL) b1 = get_columns<E>(load_words<E>(at.b1, h));
          if (G == HALVES && at.b3 != NULL) b3 = get_columns<E>(load_words<E>(at.b3, h));
        }
        SLUICE_UNROLL
        for (int v = 0; v < NEIGHBOURS; ++v) x.x[v] += b1.x[v], u.x[v] += b3.x[v];
        store_both<E, G>(pre, hidden, h, x, u);
        x = get_columns<E>(put_columns<E>(x)), u = get_columns<E>(put_columns<E>(u));
      }
      SLUICE_UNROLL
      for (int v = 0; v < NEIGHBOURS; ++v) {
        const unit_at_t<float> f = unit_at<A, E>(a, x.x[v], u.x[v]);
        act.x[v] = G == UNGATED ? f.value : f.value * f.up;
      }
      store_words<E>(row, h, put_columns<E>(act));
    }
  }
}

/* As in backend/device/cpu/kernels_ref.c. A lane's eight columns are eight of the 256 partial sums of dweight. Outputs
 * may alias inputs, so columns are read completely before they are written. */
struct row_sums_t {
  per_lane<float> of[NEIGHBOURS];
};

template <typename E, int A, int G>
SLUICE_FN void backward_row(const sluice_act_backward_args_t& a, const place_t& at, row_sums_t* sums) {
  const int64_t width = G == UNGATED ? a.hidden : 2 * a.hidden;
  const char* pre = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_PRE, a.pre, width);
  char* dpre = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_DPRE, a.dpre, width);
  const char* dact = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_DACT, a.dact, a.hidden);
  char* act_w = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_ACT_W, a.act_w, a.hidden);
  const float w = *(const float*)row_of<f32_type>(a.rows, at, SLUICE_CUDA_UNIT_WEIGHT, a.weight, 1);
  const int hidden = (int)a.hidden;
  SLUICE_LANES(lane) {
    columns_t sum = {};
    SLUICE_ONE_BY_ONE
    for (int h = lane * NEIGHBOURS; h < hidden; h += 32 * NEIGHBOURS) {
      columns_t x, u, act, dx, du;
      load_both<E, G>(pre, hidden, h, &x, &u);
      const columns_t d = get_columns<E>(load_words<E>(dact, h));
      SLUICE_UNROLL
      for (int v = 0; v < NEIGHBOURS; ++v) {
        const unit_at_t<float> f = unit_at<A, E>(a, x.x[v], u.x[v]);
        const float wd = w * d.x[v];
        act.x[v] = G == UNGATED ? f.value : f.value * f.up;
        dx.x[v] = (G == UNGATED ? wd : wd * f.up) * f.slope;
        du.x[v] = wd * f.value * f.up_slope;
      }
      act = get_columns<E>(put_columns<E>(act)); /* as forward stored it */
      SLUICE_UNROLL
      for (int v = 0; v < NEIGHBOURS; ++v) sum.x[v] += d.x[v] * act.x[v], act.x[v] *= w;
      store_both<E, G>(dpre, hidden, h, dx, du);
      if (act_w != NULL) store_words<E>(act_w, h, put_columns<E>(act));
    }
    SLUICE_UNROLL
    for (int v = 0; v < NEIGHBOURS; ++v) sums->of[v][lane] = sum.x[v];
  }
}

template <typename E, int A>
SLUICE_FN void activation_forward(const sluice_act_forward_args_t& a, int64_t unit) {
  const place_t at = place_of(a.rows, unit);
  if (a.gated == HALVES) {
    forward_row<E, A, HALVES>(a, at);
  } else if (a.gated == INTERLEAVED) {
    forward_row<E, A, INTERLEAVED>(a, at);
  } else {
    forward_row<E, A, UNGATED>(a, at);
  }
}

template <typename E, int A>
SLUICE_FN void activation_backward(const sluice_act_backward_args_t& a, int64_t unit) {
  const place_t at = place_of(a.rows, unit);
  float* dweight = (float*)row_of<f32_type>(a.rows, at, SLUICE_CUDA_UNIT_DWEIGHT, a.dweight, 1);
  row_sums_t sums;
  if (a.gated == HALVES) {
    backward_row<E, A, HALVES>(a, at, &sums);
  } else if (a.gated == INTERLEAVED) {
    backward_row<E, A, INTERLEAVED>(a, at, &sums);
  } else {
    backward_row<E, A, UNGATED>(a, at, &sums);
  }
  /* Folded by halves: over lanes, then within a lane. */
  float sum[NEIGHBOURS];
  SLUICE_UNROLL
  for (int v = 0; v < NEIGHBOURS; ++v) sum[v] = warp_fold(sums.of[v]);
  SLUICE_UNROLL
  for (int half = NEIGHBOURS / 2; half > 0; half /= 2) {
    SLUICE_UNROLL
    for (int v = 0; v < half; ++v) sum[v] += sum[v + half];
  }
  SLUICE_LANES(lane) {
    if (lane == 0) *dweight = sum[0];
  }
}

#define OF_TYPE(direction, name, A, type)                                                                           \
  SLUICE_FN void activation_##direction##_##name##_##type(const sluice_act_##direction##_args_t& a, int64_t unit) { \
    activation_##direction<type##_type, A>(a, unit);                                                                \
  }                                                                                                                 \
  SLUICE_KERNEL(activation_##direction##_##name##_##type, sluice_act_##direction##_args_t)
#define ACTIVATION(name, A)        \
  OF_TYPE(forward, name, A, f32)   \
  OF_TYPE(forward, name, A, bf16)  \
  OF_TYPE(forward, name, A, f16)   \
  OF_TYPE(backward, name, A, f32)  \
  OF_TYPE(backward, name, A, bf16) \
  OF_TYPE(backward, name, A, f16)
ACTIVATION(identity, IDENTITY)
ACTIVATION(relu, RELU)
ACTIVATION(gelu, GELU)
ACTIVATION(gelu_tanh, GELU_TANH)
ACTIVATION(silu, SILU)
ACTIVATION(relu2, RELU2)
ACTIVATION(swiglu, SWIGLU)
#undef ACTIVATION
#undef OF_TYPE

/* ---- rows of any width and alignment, and f64 ---- */

template <typename E, typename Args>
SLUICE_FN unit_at_t<typename E::value> any_unit_at(const Args& a, typename E::value x, typename E::value u) {
  switch (a.activation) {
    case RELU: return unit_at<RELU, E>(a, x, u);
    case GELU: return unit_at<GELU, E>(a, x, u);
    case GELU_TANH: return unit_at<GELU_TANH, E>(a, x, u);
    case SILU: return unit_at<SILU, E>(a, x, u);
    case RELU2: return unit_at<RELU2, E>(a, x, u);
    case SWIGLU: return unit_at<SWIGLU, E>(a, x, u);
    default: return unit_at<IDENTITY, E>(a, x, u);
  }
}

template <typename E>
SLUICE_FN void activation_forward_any(const sluice_act_forward_args_t& a, int64_t unit) {
  typedef typename E::value value;
  const place_t at = place_of(a.rows, unit);
  const int64_t step = a.gated == INTERLEAVED ? 2 : 1, up_at = a.gated == INTERLEAVED ? 1 : a.hidden;
  char* pre = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_PRE, a.pre, a.gated ? 2 * a.hidden : a.hidden);
  char* act = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_ACT, a.act, a.hidden);
  const void* b_up = a.gated == INTERLEAVED ? at.b1 : at.b3;
  SLUICE_LANES(lane) {
    SLUICE_ONE_BY_ONE
    for (int64_t h = lane; h < a.hidden; h += 32) {
      const int64_t at1 = step * h, at3 = at1 + up_at;
      if (at.b1 != NULL) store<E>(pre, at1, load<E>(pre, at1) + load<E>(at.b1, at1));
      if (a.gated && b_up != NULL) store<E>(pre, at3, load<E>(pre, at3) + load<E>(b_up, at1 + (step - 1)));
      const unit_at_t<value> f = any_unit_at<E>(a, load<E>(pre, at1), a.gated ? load<E>(pre, at3) : (value)1);
      store<E>(act, h, a.gated ? f.value * f.up : f.value);
    }
  }
}
SLUICE_KERNELS_BY_DTYPE(activation_forward_any, sluice_act_forward_args_t)

/* Lane l takes columns l, l + 32, ..: eight partial sums in turn. Those of a lane are added as they come, in the order
 * of a fold by halves: 0 and 4, 2 and 6, 1 and 5, 3 and 7. */
template <typename E>
SLUICE_FN void activation_backward_any(const sluice_act_backward_args_t& a, int64_t unit) {
  typedef typename E::value value;
  const place_t at = place_of(a.rows, unit);
  const int64_t step = a.gated == INTERLEAVED ? 2 : 1, up_at = a.gated == INTERLEAVED ? 1 : a.hidden;
  const int64_t width = a.gated ? 2 * a.hidden : a.hidden;
  const char* pre = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_PRE, a.pre, width);
  char* dpre = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_DPRE, a.dpre, width);
  const char* dact = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_DACT, a.dact, a.hidden);
  char* act_w = row_of<E>(a.rows, at, SLUICE_CUDA_UNIT_ACT_W, a.act_w, a.hidden);
  const value w = (value) * (const float*)row_of<f32_type>(a.rows, at, SLUICE_CUDA_UNIT_WEIGHT, a.weight, 1);
  per_lane<value> sums;
  SLUICE_LANES(lane) {
    value of_two = 0, of_four = 0, of_eight = 0, sum = 0;
    SLUICE_ONE_BY_ONE
    for (int turn = 0; turn < NEIGHBOURS; ++turn) {
      const int partial = (turn & 1) * 4 + (turn & 2) + (turn >> 2);
      sum = 0;
      SLUICE_ONE_BY_ONE
      for (int64_t h = lane + 32 * partial; h < a.hidden; h += 32 * NEIGHBOURS) {
        const int64_t at1 = step * h, at3 = at1 + up_at;
        const unit_at_t<value> f = any_unit_at<E>(a, load<E>(pre, at1), a.gated ? load<E>(pre, at3) : (value)1);
        const value d = load<E>(dact, h), wd = w * d;
        const value act = E::get(E::put(a.gated ? f.value * f.up : f.value)); /* as forward stored it */
        sum += d * act;
        store<E>(dpre, at1, (a.gated ? wd * f.up : wd) * f.slope);
        if (a.gated) store<E>(dpre, at3, wd * f.value * f.up_slope);
        if (act_w != NULL) store<E>(act_w, h, w * act);
      }
      if ((turn & 1) == 0) {
        of_two = sum;
        continue;
      }
      sum = of_two + sum;
      if ((turn & 2) == 0) {
        of_four = sum;
        continue;
      }
      sum = of_four + sum;
      if ((turn & 4) == 0) of_eight = sum;
    }
    sums[lane] = of_eight + sum;
  }
  const value sum = warp_fold(sums);
  SLUICE_LANES(lane) {
    if (lane == 0) *(float*)row_of<f32_type>(a.rows, at, SLUICE_CUDA_UNIT_DWEIGHT, a.dweight, 1) = (float)sum;
  }
}
SLUICE_KERNELS_BY_DTYPE(activation_backward_any, sluice_act_backward_args_t)
