// SPDX-License-Identifier: Apache-2.0
/* GELU, its tanh form and SiLU with their slopes, on vectors of f32.
 *
 * The relative error is small everywhere, including the far negative tail, where 0.5 * (1 + erf) has lost every digit.
 * The tail is a small number times exp, so all three are built from
 *   exp(w) = (1 + e) * 2^n
 * and scale by 2^n only at the end, where a subnormal result is rounded only once. Coefficients are minimax fits, each
 * rounded to f32. Measured errors: kernels_accuracy_test.c. */

/* exp(w + w_lo) = (1 + e) * 2^n for w in [-127, 88], |w_lo| below an ulp of w. */
INLINE void exp_parts(vf w, vf w_lo, vf* out_e, vu* out_n) {
  vf magic = vf_set1(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits */
  vf shifted = vf_fma(w, vf_set1(1.44269504f), magic);
  vf n = shifted - magic;
  vf r = vf_fma(n, vf_set1(-0.693147182f), w);
  r = vf_fma(n, vf_set1(1.90465421e-9f), r) + w_lo;
  vf q = vf_set1(1.38207397e-3f);
  q = vf_fma(q, r, vf_set1(8.36867746e-3f));
  q = vf_fma(q, r, vf_set1(4.16682661e-2f));
  q = vf_fma(q, r, vf_set1(0.166665211f));
  q = vf_fma(q, r, vf_set1(0.49999994f));
  *out_e = vf_fma(r * r, q, r);
  *out_n = (vu)shifted - (vu)magic;
}

/* x * 2^n for n in [-250, 127]: in two steps, because 2^n alone may be below the smallest float. */
INLINE vf scale_by(vf x, vu n) {
  vu half = (vu)((vi)n >> 1);
  vu rest = n - half;
  return x * (vf)((half + 127u) << 23) * (vf)((rest + 127u) << 23);
}

/* NaN if x is -inf, else y: f(-inf) = -inf * 0. */
INLINE vf with_minus_infinity(vf x, vf y) { return vf_fma(vf_min(x, vf_set1(0)), vf_set1(0), y); }

/* x * sigmoid(v + v_lo), and the two factors of its slope: sigmoid, and sigmoid * (1 - sigmoid). v has the sign of x; a
 * = |x|, clamped where a * exp(-|v|) is not yet 0. */
typedef struct {
  vf value, sigmoid, problem;
} sigmoid_t;

INLINE sigmoid_t times_sigmoid(vf x, vf a, vf v, vf v_lo) {
  vf minus = vf_max(vf_set1(-120), vf_pick_negative(v, v, -v)); /* -|v| */
  vf e;
  vu n;
  exp_parts(minus, vf_pick_negative(v, v_lo, -v_lo), &e, &n);
  vf z = scale_by(vf_set1(1) + e, n); /* exp(-|v|) in [0, 1] */
  vf d = vf_set1(1) + z;
  vf r = vf_set1(1) / d;
  /* f(x) = max(x, 0) - a * z / (1 + z); the residual makes the quotient as accurate as a division. */
  vf numerator = vf_fma(a, e, a);
  vf q = numerator * r;
  q = vf_fma(vf_fma(-q, d, numerator), r, q);
  sigmoid_t out;
  out.value = with_minus_infinity(x, vf_max(vf_set1(0), x) - scale_by(q, n));
  out.sigmoid = vf_pick_negative(v, z * r, r);
  out.problem = r * (z * r);
  return out;
}

INLINE vf magnitude(vf x) { return vf_pick_negative(x, -x, x); }

INLINE sigmoid_t silu_parts(vf x) { return times_sigmoid(x, vf_min(vf_set1(120), magnitude(x)), x, vf_set1(0)); }

INLINE vf silu(vf x) { return silu_parts(x).value; }

INLINE void silu_both(vf x, vf* out_value, vf* out_slope) {
  sigmoid_t s = silu_parts(x);
  *out_value = s.value;
  *out_slope = vf_fma(x, s.problem, s.sigmoid); /* s + x s (1 - s) */
}

/* v = 2 sqrt(2/pi) (x + 0.044715 x^3) for |x| <= 11 in two floats, because exp turns its absolute error into a relative
 * one. c0 has few bits, so that p - c0 is exact. */
INLINE void gelu_tanh_argument(vf x, vf* out_v, vf* out_v_lo) {
  vf c0 = vf_set1(1.59576892853f), c0_lo = vf_set1(1.930779e-7f);
  vf c1 = vf_set1(0.0713548139f), c1_lo = vf_set1(2.39883247e-9f);
  vf s = x * x;
  vf s_lo = vf_fma(x, x, -s);
  vf p = vf_fma(c1, s, c0);
  vf p_lo = vf_fma(c1, s, -(p - c0)) + vf_fma(c1, s_lo, vf_fma(c1_lo, s, c0_lo));
  vf v = x * p;
  *out_v = v;
  *out_v_lo = vf_fma(x, p_lo, vf_fma(x, p, -v));
}

INLINE sigmoid_t gelu_tanh_parts(vf x, vf near) {
  vf v, v_lo;
  gelu_tanh_argument(near, &v, &v_lo);
  return times_sigmoid(x, magnitude(near), v, v_lo);
}

INLINE vf gelu_tanh(vf x) { return gelu_tanh_parts(x, vf_max(vf_set1(-11), vf_min(vf_set1(11), x))).value; }

INLINE void gelu_tanh_both(vf x, vf* out_value, vf* out_slope) {
  vf near = vf_max(vf_set1(-11), vf_min(vf_set1(11), x));
  sigmoid_t s = gelu_tanh_parts(x, near);
  vf dv = vf_fma(vf_set1(0.214064449f) * near, near, vf_set1(1.59576917f)); /* v' */
  *out_value = s.value;
  *out_slope = vf_fma(x, s.problem * dv, s.sigmoid);
}

/* GELU by erf. With a = |x|, the tail Q(a) = erfc(a / sqrt 2) / 2 = P(a) * exp(-a^2 / 2), P a polynomial in
 * q = (a - 3) / (a + 3), and f(x) = max(x, 0) - a * Q(a), which has no cancellation on either side. */
typedef struct {
  vf tail, e; /* Q = tail * 2^n; exp(-a^2 / 2) = (1 + e) * 2^n */
  vu n;
} gelu_t;

INLINE gelu_t gelu_parts(vf a) {
  vf m = a - vf_set1(3), d = a + vf_set1(3);
  vf r = vf_set1(1) / d;
  vf q = m * r;
  q = vf_fma(r, vf_fma(-a, q, vf_fma(vf_set1(-3), q + vf_set1(1), a)), q); /* the residual a - 3 - q * (a + 3) */
  vf p = vf_set1(5.35431391e-5f);
  p = vf_fma(p, q, vf_set1(1.15423347e-4f));
  p = vf_fma(p, q, vf_set1(-3.39490041e-4f));
  p = vf_fma(p, q, vf_set1(-9.83768958e-4f));
  p = vf_fma(p, q, vf_set1(2.9046312e-3f));
  p = vf_fma(p, q, vf_set1(6.13212632e-3f));
  p = vf_fma(p, q, vf_set1(-4.62133251e-2f));
  p = vf_fma(p, q, vf_set1(0.123225018f));
  p = vf_fma(p, q, vf_set1(-0.206402615f));
  vf c0 = vf_set1(0.121513948f), last = p;
  p = vf_fma(last, q, c0);
  vf p_lo = vf_fma(last, q, c0 - p); /* the rounding error of the last step */
  vf half = vf_set1(-0.5f) * a;
  vf w = half * a;
  gelu_t out;
  exp_parts(w, vf_fma(half, a, -w), &out.e, &out.n);
  out.tail = p + vf_fma(p, out.e, p_lo);
  return out;
}

INLINE vf gelu_value(vf x, vf a, gelu_t g) {
  return with_minus_infinity(x, vf_max(vf_set1(0), x) - scale_by(a * g.tail, g.n));
}

INLINE vf gelu(vf x) {
  vf a = vf_min(vf_set1(15), magnitude(x)); /* Q(15) * 15 is 0 in f32 */
  return gelu_value(x, a, gelu_parts(a));
}

INLINE void gelu_both(vf x, vf* out_value, vf* out_slope) {
  vf a = vf_min(vf_set1(15), magnitude(x));
  gelu_t g = gelu_parts(a);
  vf tail = scale_by(g.tail, g.n);
  vf density = scale_by(vf_fma(vf_set1(0.398942280f), g.e, vf_set1(0.398942280f)), g.n);
  *out_value = gelu_value(x, a, g);
  *out_slope = vf_fma(x, density, vf_pick_negative(x, tail, vf_set1(1) - tail)); /* Phi(x) + x phi(x) */
}

INLINE vf relu(vf x) { return vf_max(vf_set1(0), x); }

INLINE void relu_both(vf x, vf* out_value, vf* out_slope) {
  *out_value = relu(x);
  *out_slope = vf_step(x);
}

/* max(x, 0)^2 */
INLINE vf relu2(vf x) { return relu(x) * relu(x); }

INLINE void relu2_both(vf x, vf* out_value, vf* out_slope) {
  vf r = relu(x);
  *out_value = r * r;
  *out_slope = r + r;
}

/* SWIGLU of kernels.h. `inside` is 1 if a clamp lets a value through. */
typedef struct {
  vf alpha, limit, offset, held;
} swiglu_t;

/* alpha * g is clamped with g, because it may overflow, and its rounding error would then be NaN. */
INLINE sigmoid_t swiglu_parts(swiglu_t s, vf x, vf* out_v) {
  vf g = vf_min(s.limit, x);
  vf a = vf_min(s.held, magnitude(g));
  vf near = vf_pick_negative(g, -a, a);
  *out_v = s.alpha * near;
  return times_sigmoid(g, a, *out_v, vf_fma(s.alpha, near, -*out_v));
}

INLINE vf swiglu_gate(swiglu_t s, vf x) {
  vf v;
  return swiglu_parts(s, x, &v).value;
}
INLINE vf swiglu_up(swiglu_t s, vf u) { return vf_max(-s.limit, vf_min(s.limit, u)) + s.offset; }

INLINE void swiglu_both(swiglu_t s, vf x, vf u, vf* out_value, vf* out_slope, vf* out_up, vf* out_up_slope) {
  vf v;
  sigmoid_t parts = swiglu_parts(s, x, &v);
  vf one = vf_set1(1);
  *out_value = parts.value;
  *out_slope = (one - vf_step(x - s.limit)) * vf_fma(v, parts.problem, parts.sigmoid);
  *out_up = swiglu_up(s, u);
  *out_up_slope = (one - vf_step(u - s.limit)) * (one - vf_step(-s.limit - u));
}
