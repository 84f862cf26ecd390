/* The loops of a step, written once in plain C and compiled for each instruction set by the file that includes it,
 * and names its table by KERNELS_OF. The compiler makes vectors of them; nothing here may depend on how wide they are:
 * what is fused says fmaf (-ffp-contract=off does no more), and sums are kept in LANES of their own. */
#include <math.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/optim/adam.h"

enum {
  BLOCK = 128, /* elements that one loop hands to the next in the first cache */
  LANES = 16,  /* sums of squares of a scan */
  STRIP = 64,  /* elements between two requests for what comes AHEAD of them: four lines of each array */
  AHEAD = 256,
  KEPT = 512, /* elements that are looked at together */
};

#define BITS_OF_INFINITY 0x7f800000u

/* Bits of |x|: of numbers in their order, above them infinity, above it what is no number. */
static inline uint32_t magnitude_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffffu;
}

/* Elements [first, first + count) of grad as f32; the result lies in `room` or in grad itself. */
static const float* as_f32(const void* data, int32_t dtype, int64_t first, int64_t count, float* room) {
  if (dtype == SLUICE_DTYPE_F32) return (const float*)data + first;
  const uint16_t* half = (const uint16_t*)data + first;
  if (dtype == SLUICE_DTYPE_BF16) {
    for (int64_t i = 0; i < count; ++i) room[i] = sluice_bf16_to_f32(half[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) room[i] = sluice_f16_to_f32(half[i]);
  }
  return room;
}

static void from_f32(const float* data, int64_t count, void* out, int32_t dtype, int64_t first) {
  if (dtype == SLUICE_DTYPE_F32) {
    memcpy((float*)out + first, data, (size_t)count * sizeof *data);
    return;
  }
  uint16_t* half = (uint16_t*)out + first;
  if (dtype == SLUICE_DTYPE_BF16) {
    for (int64_t i = 0; i < count; ++i) half[i] = sluice_f32_to_bf16(data[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) half[i] = sluice_f32_to_f16(data[i]);
  }
}

/* The rules of adam.h, in one loop: the root and the division of one element run while the next ones come from memory.
 * A rounding error of s, d and q is the remainder that fmaf leaves; each is brought to the quotient by way of the
 * reciprocal of d, so that there is one division. has_l2 is known when this is compiled: 0 times an infinite p is NaN.
 */
static inline void update_strip(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                                int64_t count, sluice_adam_numbers_t n, int has_l2, float* restrict minus_p) {
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = grad[i] * n.grad_scale;
    const float g = has_l2 ? fmaf(n.l2, p[i], scaled) : scaled;
    const float m_new = fmaf(n.one_minus_beta1, g, fmaf(-n.one_minus_beta1, m[i], m[i]));
    const float v_new = fmaf(n.one_minus_beta2 * g, g, fmaf(-n.one_minus_beta2, v[i], v[i]));
    const float s = sqrtf(v_new);
    const float d = s + n.epsilon_high;
    const float rest = d - s; /* Knuth's sum: what d lost of s and of epsilon */
    const float lost_in_sum = (s - (d - rest)) + (n.epsilon_high - rest) + n.epsilon_low;
    const float reciprocal = 1.0F / d;
    const float q = m_new * reciprocal;
    const float lost_in_root = fmaf(-s, s, v_new) * reciprocal; /* twice, where s is most of d; else it hardly counts */
    const float d_low = fmaf(0.5F, lost_in_root, lost_in_sum);
    const float q_low = fmaf(-q, d_low, fmaf(-q, d, m_new)) * reciprocal;
    const float small = fmaf(n.step_high, q_low, fmaf(n.step_low, q, n.decay * p[i]));
    minus_p[i] = -p[i]; /* a plain copy would become a call of memcpy */
    m[i] = m_new;
    v[i] = v_new;
    p[i] = fmaf(-n.step_high, q, p[i] - small);
  }
}

/* Where p or v is infinite, or d is 0, the remainders of q are NaN, and q needs none. All such elements, and few
 * others, have become infinite or NaN. An infinite v has become NaN; so it does by m, or stays it, which is then NaN
 * too. */
static void take_care(float* p, const float* m, float* v, int64_t count, const sluice_adam_numbers_t* n,
                      const float* minus_p) {
  for (int64_t i = 0; i < count; ++i) {
    if (isfinite(p[i])) continue;
    if (isnan(v[i]) && !isnan(m[i])) v[i] = INFINITY;
    const float q = m[i] / (sqrtf(v[i]) + n->epsilon_high);
    p[i] = fmaf(-n->step_high, q, minus_p[i] * (n->decay - 1.0F));
  }
}

static int is_any_infinite_or_nan(const float* data, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude_bits(data[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest >= BITS_OF_INFINITY;
}

/* The arithmetic of a strip is as long as the way of its bytes: without being asked the processor fetches too few of
 * them meanwhile. Asking for what lies behind an array does nothing. */
static void update_strips(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                          int64_t count, const sluice_adam_numbers_t* numbers, float* restrict minus_p) {
  enum { LINE = 16 };
  for (int64_t i = 0; i < count; i += STRIP) {
    for (int64_t next = i + AHEAD; next < i + AHEAD + STRIP; next += LINE) {
      __builtin_prefetch(p + next, 1);
      __builtin_prefetch(m + next, 1);
      __builtin_prefetch(v + next, 1);
      __builtin_prefetch(grad + next, 0);
    }
    const int64_t size = sluice_min(STRIP, count - i);
    if (numbers->l2 != 0.0F) {
      update_strip(p + i, m + i, v + i, grad + i, size, *numbers, 1, minus_p + i);
    } else {
      update_strip(p + i, m + i, v + i, grad + i, size, *numbers, 0, minus_p + i);
    }
  }
}

static void update_rows(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                        int64_t count, const sluice_adam_numbers_t* numbers) {
  float minus_p[KEPT];
  for (int64_t i = 0; i < count; i += KEPT) {
    const int64_t size = sluice_min(KEPT, count - i);
    update_strips(p + i, m + i, v + i, grad + i, size, numbers, minus_p);
    if (is_any_infinite_or_nan(p + i, size)) take_care(p + i, m + i, v + i, size, numbers, minus_p);
  }
}

static void update(const sluice_adam_tensor_t* t, int64_t first, int64_t count, const sluice_adam_numbers_t* n) {
  float grad_room[BLOCK], param_room[BLOCK];
  const int in_place = t->master == NULL && t->param_dtype == SLUICE_DTYPE_F32;
  if (in_place && t->grad_dtype == SLUICE_DTYPE_F32) {
    update_rows((float*)t->param + first, t->exp_avg + first, t->exp_avg_sq + first, (const float*)t->grad + first,
                count, n);
    return;
  }
  for (int64_t end = first + count; first < end; first += BLOCK) {
    const int64_t size = sluice_min(BLOCK, end - first);
    const float* grad = as_f32(t->grad, t->grad_dtype, first, size, grad_room);
    float* master = t->master != NULL ? t->master + first : in_place ? (float*)t->param + first : param_room;
    if (master == param_room) as_f32(t->param, t->param_dtype, first, size, param_room);
    update_rows(master, t->exp_avg + first, t->exp_avg_sq + first, grad, size, n);
    if (!in_place) from_f32(master, size, t->param, t->param_dtype, first);
  }
}

static sluice_adam_scan_t scan(const void* grad, int32_t dtype, int64_t first, int64_t count) {
  float room[BLOCK];
  double sums[LANES] = {0.0};
  uint32_t largest = 0;
  for (int64_t end = first + count; first < end; first += BLOCK) {
    const int64_t size = sluice_min(BLOCK, end - first);
    const float* g = as_f32(grad, dtype, first, size, room);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      for (int64_t lane = 0; lane < LANES; ++lane) sums[lane] += (double)g[i + lane] * (double)g[i + lane];
    }
    for (int64_t lane = 0; i + lane < size; ++lane) sums[lane] += (double)g[i + lane] * (double)g[i + lane];
    for (int64_t j = 0; j < size; ++j) {
      const uint32_t bits = magnitude_bits(g[j]);
      largest = bits > largest ? bits : largest;
    }
  }
  sluice_adam_scan_t found = {.sum_of_squares = 0.0, .largest = INFINITY};
  for (int64_t lane = 0; lane < LANES; ++lane) found.sum_of_squares += sums[lane];
  if (largest < BITS_OF_INFINITY) memcpy(&found.largest, &largest, sizeof largest);
  return found;
}

#define KERNELS_OF(NAME) \
  { (NAME), update, scan }
