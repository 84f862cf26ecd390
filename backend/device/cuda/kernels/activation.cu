/* Activations and gated activations, with bias; the equations of backend/device/cpu/kernels_math.h in the layer's
 * arithmetic (f32 for f32, bf16 and f16). */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

enum { IDENTITY = 0, RELU = 1, GELU = 2, GELU_TANH = 3, SILU = 4, RELU2 = 5, SWIGLU = 6 }; /* SLUICE_ACTIVATION_* */

SLUICE_FN float exp_of(float x) { return expf(x); }
SLUICE_FN double exp_of(double x) { return exp(x); }
SLUICE_FN float erfc_of(float x) { return erfcf(x); }
SLUICE_FN double erfc_of(double x) { return erfc(x); }
SLUICE_FN float abs_of(float x) { return fabsf(x); }
SLUICE_FN double abs_of(double x) { return fabs(x); }

/* 1 / (1 + exp(-x)) without overflow on either side. */
template <typename V>
SLUICE_FN V sigmoid_of(V x) {
  const V z = exp_of(-abs_of(x));
  return x < 0 ? z / (1 + z) : 1 / (1 + z);
}

template <typename V>
SLUICE_FN V gelu_tanh_argument(V x) { /* 2 sqrt(2 / pi) (x + 0.044715 x^3) */
  return (V)1.59576912160573071176 * (x + (V)0.044715 * x * x * x);
}

template <typename V>
SLUICE_FN V activation_value(int activation, V x) {
  switch (activation) {
    case RELU: return x <= 0 ? 0 : x; /* NaN stays NaN */
    case GELU: return x * ((V)0.5 * erfc_of(-x * (V)0.70710678118654752440));
    case GELU_TANH: return x * sigmoid_of(gelu_tanh_argument(x));
    case SILU: return x * sigmoid_of(x);
    case RELU2: return x <= 0 ? 0 : x * x;
    default: return x;
  }
}

template <typename V>
SLUICE_FN V activation_slope(int activation, V x) {
  switch (activation) {
    case RELU: return x > 0 ? 1 : (x <= 0 ? 0 : x);
    case GELU:
      return (V)0.5 * erfc_of(-x * (V)0.70710678118654752440) +
             x * ((V)0.39894228040143267794 * exp_of((V)-0.5 * x * x));
    case GELU_TANH: {
      const V s = sigmoid_of(gelu_tanh_argument(x)), st = s * (1 - s);
      const V dv = (V)1.59576912160573071176 * (1 + (V)(3 * 0.044715) * x * x);
      return s + x * (st == 0 ? (V)0 : st * dv); /* dv is infinite beyond 1e19 */
    }
    case SILU: {
      const V s = sigmoid_of(x);
      return s + x * (s * (1 - s));
    }
    case RELU2: return x <= 0 ? 0 : 2 * x;
    default: return 1;
  }
}

/* f(x), f'(x), v(u), v'(u) of a unit (kernels.h). */
template <typename V>
struct unit_at_t {
  V value, slope, up, up_slope;
};

template <typename V, typename Args>
SLUICE_FN unit_at_t<V> unit_at(const Args& a, V x, V u) {
  unit_at_t<V> r;
  if (a.activation != SWIGLU) {
    r.value = activation_value<V>(a.activation, x);
    r.slope = activation_slope<V>(a.activation, x);
    r.up = u;
    r.up_slope = 1;
    return r;
  }
  const V limit = (V)a.limit, alpha = (V)a.alpha;
  const V g = x > limit ? limit : x; /* NaN stays NaN */
  const V s = sigmoid_of(alpha * g);
  const V clamped = u > limit ? limit : (u < -limit ? -limit : u);
  r.value = g * s;
  r.slope = x > limit ? (V)0 : s + alpha * (g * (s * (1 - s))); /* alpha g may be infinite */
  r.up = clamped + (V)a.offset;
  r.up_slope = abs_of(u) > limit ? (V)0 : (u != u ? u : (V)1);
  return r;
}

/* The columns of x and u in a row of pre: interleaved, or in two halves. */
enum { INTERLEAVED = 2 };

/* pre += bias, rounded; act = f(x), gated: f(x) v(u). N > 1 only if columns are in halves. */
template <typename E, int N>
SLUICE_FN void forward_by(const sluice_act_forward_args_t& a, int64_t i) {
  typedef typename E::value value;
  const int64_t width = a.gated ? 2 * a.hidden : a.hidden;
  const int64_t step = a.gated == INTERLEAVED ? 2 : 1, up_at = a.gated == INTERLEAVED ? 1 : a.hidden;
  const void* b_up = a.gated == INTERLEAVED ? a.b1 : a.b3;
  SLUICE_LANES(lane) {
    for (int64_t h = (int64_t)lane * N; h < a.hidden; h += (int64_t)32 * N) {
      const int64_t at1 = i * width + step * h, at3 = at1 + up_at;
      pack_t<E, N> x = load_pack<E, N>(a.pre, at1), up = x, act;
      if (a.gated) up = load_pack<E, N>(a.pre, at3);
      if (a.b1 != NULL) {
        const pack_t<E, N> b = load_pack<E, N>(a.b1, step * h);
        SLUICE_UNROLL
        for (int v = 0; v < N; ++v) x.x[v] = E::put(E::get(x.x[v]) + E::get(b.x[v]));
        store_pack<E, N>(a.pre, at1, x);
      }
      if (a.gated && b_up != NULL) {
        const pack_t<E, N> b = load_pack<E, N>(b_up, step * h + (step - 1));
        SLUICE_UNROLL
        for (int v = 0; v < N; ++v) up.x[v] = E::put(E::get(up.x[v]) + E::get(b.x[v]));
        store_pack<E, N>(a.pre, at3, up);
      }
      SLUICE_UNROLL
      for (int v = 0; v < N; ++v) {
        const unit_at_t<value> u = unit_at<value>(a, E::get(x.x[v]), a.gated ? E::get(up.x[v]) : (value)1);
        act.x[v] = E::put(a.gated ? u.value * u.up : u.value);
      }
      store_pack<E, N>(a.act, i * a.hidden + h, act);
    }
  }
}
template <typename E>
SLUICE_FN void activation_forward(const sluice_act_forward_args_t& a, int64_t i) {
  if (a.wide) {
    forward_by<E, wide_of<E>::N>(a, i);
  } else {
    forward_by<E, 1>(a, i);
  }
}
SLUICE_KERNELS_BY_DTYPE(activation_forward, sluice_act_forward_args_t)

/* As backend/device/cpu/kernels_ref.c. One element per lane and step: the partial sums of dweight are by element mod
 * 32, and outputs may alias inputs, so each element is read completely before it is written. */
template <typename E>
SLUICE_FN void activation_backward(const sluice_act_backward_args_t& a, int64_t i) {
  typedef typename E::value value;
  const int64_t width = a.gated ? 2 * a.hidden : a.hidden;
  const int64_t step = a.gated == INTERLEAVED ? 2 : 1, up_at = a.gated == INTERLEAVED ? 1 : a.hidden;
  const value w = (value)a.weight[i];
  per_lane<value> partial;
  SLUICE_LANES(lane) {
    value sum = 0;
    for (int64_t h = lane; h < a.hidden; h += 32) {
      const int64_t at1 = i * width + step * h, at3 = at1 + up_at;
      const unit_at_t<value> u = unit_at<value>(a, load<E>(a.pre, at1), a.gated ? load<E>(a.pre, at3) : (value)1);
      const value d = load<E>(a.dact, i * a.hidden + h);
      const value f = u.value, slope = u.slope, up = a.gated ? u.up : (value)1;
      const value act = E::get(E::put(f * up)); /* the value that forward stored */
      sum += d * act;
      const value wd = w * d;
      store<E>(a.dpre, at1, wd * up * slope);
      if (a.gated) store<E>(a.dpre, at3, wd * f * u.up_slope);
      if (a.act_w != NULL) store<E>(a.act_w, i * a.hidden + h, w * act);
    }
    partial[lane] = sum;
  }
  const value sum = warp_fold(partial);
  SLUICE_LANES(lane) {
    if (lane == 0) a.dweight[i] = (float)sum;
  }
}
SLUICE_KERNELS_BY_DTYPE(activation_backward, sluice_act_backward_args_t)
