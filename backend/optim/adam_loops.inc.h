// SPDX-License-Identifier: Apache-2.0
/* The loops of a step, written once in plain C. Each instruction set includes this file and names its table with
 * KERNELS_OF. The compiler vectorizes the loops, and no result may depend on the vector width: fused operations are
 * written as fmaf (-ffp-contract=off fuses no others), and sums are kept in LANES separate sums. */
#include <math.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/optim/adam.h"

enum {
  BLOCK = 128, /* elements per inner loop; they stay in the L1 cache */
  LANES = 16,  /* partial sums of squares of a scan */
  STRIP = 64,  /* elements between two prefetches, AHEAD elements in advance: four cache lines of each array */
  AHEAD = 256,
  LOOKS = 128, /* largest magnitudes of a look, eight vectors or more: their loads are under way at once */
  KEPT = 512,  /* elements of p that an exact update keeps negated for its repairs */
};

#define BITS_OF_INFINITY 0x7f800000u

/* Returns the bits of |x|. They order numbers by size, then infinity, then NaN. */
static inline uint32_t magnitude_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffffu;
}

/* Returns elements [first, first + count) of grad as f32: in `room`, or in grad itself. */
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

/* The rules of adam.h in one loop, so that the root and division of one element overlap with the loads of the next. The
 * rounding errors of s, d and q are the remainders that fmaf gives. All are applied to the quotient with the reciprocal
 * of d, so that there is one division. has_l2 is a compile-time constant because 0 times an infinite p is NaN. */
static inline void update_strip(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                                int64_t count, sluice_adam_numbers_t n, int has_l2, float* restrict minus_p) {
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = grad[i] * n.grad_scale;
    const float g = has_l2 ? fmaf(n.l2, p[i], scaled) : scaled;
    const float m_new = fmaf(n.one_minus_beta1, g, fmaf(-n.one_minus_beta1, m[i], m[i]));
    const float v_new = fmaf(n.one_minus_beta2 * g, g, fmaf(-n.one_minus_beta2, v[i], v[i]));
    const float s = sqrtf(v_new);
    const float d = s + n.epsilon_high;
    const float rest = d - s; /* Knuth's two-sum: the rounding error of s + epsilon */
    const float lost_in_sum = (s - (d - rest)) + (n.epsilon_high - rest) + n.epsilon_low;
    const float reciprocal = 1.0F / d;
    const float q = m_new * reciprocal;
    const float lost_in_root =
        fmaf(-s, s, v_new) * reciprocal; /* twice the error if s is most of d; else it hardly matters */
    const float d_low = fmaf(0.5F, lost_in_root, lost_in_sum);
    const float q_low = fmaf(-q, d_low, fmaf(-q, d, m_new)) * reciprocal;
    const float small = fmaf(n.step_high, q_low, fmaf(n.step_low, q, n.decay * p[i]));
    minus_p[i] = -p[i]; /* a plain copy would be compiled to a memcpy call */
    m[i] = m_new;
    v[i] = v_new;
    p[i] = fmaf(-n.step_high, q, p[i] - small);
  }
}

/* The same rules with each operation rounded once, as in torch, and without corrections. Infinite elements need no
 * repair: an infinite p or v stays infinite. */
static inline void round_strip(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                               int64_t count, sluice_adam_numbers_t n, int has_l2) {
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = grad[i] * n.grad_scale;
    const float g = has_l2 ? fmaf(n.l2, p[i], scaled) : scaled;
    const float m_new = fmaf(n.one_minus_beta1, g - m[i], m[i]);
    const float v_new = fmaf(n.one_minus_beta2 * g, g, n.beta2 * v[i]);
    m[i] = m_new;
    v[i] = v_new;
    p[i] = fmaf(-n.step_high, m_new / (sqrtf(v_new) + n.epsilon_high), n.kept * p[i]);
  }
}

/* Repairs elements whose p or v is infinite or whose d is 0: the remainders of q are NaN there, and q needs no
 * correction. All such elements, and few others, are infinite or NaN after update_strip. An infinite v has become NaN:
 * it is set to infinity again, unless m is NaN, since v is NaN then too. */
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

/* Prefetches all four arrays. Where the arithmetic of a strip takes as long as its memory traffic, the hardware
 * prefetcher alone fetches too little. A prefetch past the end of an array has no effect. */
static inline void ask_ahead(const float* p, const float* m, const float* v, const float* grad, int64_t i) {
  enum { LINE = 16 };
  for (int64_t next = i + AHEAD; next < i + AHEAD + STRIP; next += LINE) {
    __builtin_prefetch(p + next, 1);
    __builtin_prefetch(m + next, 1);
    __builtin_prefetch(v + next, 1);
    __builtin_prefetch(grad + next, 0);
  }
}

static void update_strips(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                          int64_t count, const sluice_adam_numbers_t* numbers, float* restrict minus_p) {
  for (int64_t i = 0; i < count; i += STRIP) {
    ask_ahead(p, m, v, grad, i);
    const int64_t size = sluice_min(STRIP, count - i);
    if (numbers->l2 != 0.0F) {
      update_strip(p + i, m + i, v + i, grad + i, size, *numbers, 1, minus_p + i);
    } else {
      update_strip(p + i, m + i, v + i, grad + i, size, *numbers, 0, minus_p + i);
    }
  }
}

typedef void (*rows_fn_t)(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                          int64_t count, const sluice_adam_numbers_t* numbers);

static void round_rows(float* restrict p, float* restrict m, float* restrict v, const float* restrict grad,
                       int64_t count, const sluice_adam_numbers_t* numbers) {
  for (int64_t i = 0; i < count; i += STRIP) {
    ask_ahead(p, m, v, grad, i);
    const int64_t size = sluice_min(STRIP, count - i);
    if (numbers->l2 != 0.0F) {
      round_strip(p + i, m + i, v + i, grad + i, size, *numbers, 1);
    } else {
      round_strip(p + i, m + i, v + i, grad + i, size, *numbers, 0);
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

static inline void update_by(rows_fn_t rows, const sluice_adam_tensor_t* t, int64_t first, int64_t count,
                             const sluice_adam_numbers_t* n) {
  float grad_room[BLOCK], param_room[BLOCK];
  const int in_place = t->master == NULL && t->param_dtype == SLUICE_DTYPE_F32;
  if (in_place && t->grad_dtype == SLUICE_DTYPE_F32) {
    rows((float*)t->param + first, t->exp_avg + first, t->exp_avg_sq + first, (const float*)t->grad + first, count, n);
    return;
  }
  for (int64_t end = first + count; first < end; first += BLOCK) {
    const int64_t size = sluice_min(BLOCK, end - first);
    const float* grad = as_f32(t->grad, t->grad_dtype, first, size, grad_room);
    float* master = t->master != NULL ? t->master + first : in_place ? (float*)t->param + first : param_room;
    if (master == param_room) as_f32(t->param, t->param_dtype, first, size, param_room);
    rows(master, t->exp_avg + first, t->exp_avg_sq + first, grad, size, n);
    if (!in_place) from_f32(master, size, t->param, t->param_dtype, first);
  }
}

static void update(const sluice_adam_tensor_t* t, int64_t first, int64_t count, const sluice_adam_numbers_t* n) {
  update_by(update_rows, t, first, count, n);
}

static void update_rounded(const sluice_adam_tensor_t* t, int64_t first, int64_t count,
                           const sluice_adam_numbers_t* n) {
  update_by(round_rows, t, first, count, n);
}

/* Raises each of `lanes` running magnitudes to that of its element. `lanes` is a constant, so that the compiler keeps
 * the array in registers. */
static inline __attribute__((always_inline)) void take_largest(const float* g, int64_t lanes, uint32_t* largest) {
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const uint32_t bits = magnitude_bits(g[lane]);
    largest[lane] = bits > largest[lane] ? bits : largest[lane];
  }
}

static sluice_adam_scan_t found_of(double sum_of_squares, const uint32_t* largest, int64_t lanes) {
  uint32_t most = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) most = largest[lane] > most ? largest[lane] : most;
  sluice_adam_scan_t found = {.sum_of_squares = sum_of_squares, .largest = INFINITY};
  if (most < BITS_OF_INFINITY) memcpy(&found.largest, &most, sizeof most);
  return found;
}

/* Finds only the largest magnitude. The hardware prefetcher reads one array faster than prefetches do. */
static sluice_adam_scan_t look(const void* grad, int32_t dtype, int64_t first, int64_t count) {
  float room[BLOCK];
  uint32_t largest[LOOKS] = {0};
  for (int64_t end = first + count, size; first < end; first += size) {
    size = dtype == SLUICE_DTYPE_F32 ? end - first : sluice_min(BLOCK, end - first);
    const float* g = as_f32(grad, dtype, first, size, room);
    int64_t i = 0;
    for (; i + LOOKS <= size; i += LOOKS) take_largest(g + i, LOOKS, largest);
    for (; i < size; ++i) take_largest(g + i, 1, largest);
  }
  return found_of(0.0, largest, LOOKS);
}

/* Adds the square of each element, which is exact in f64, to a sum of its own. */
static inline __attribute__((always_inline)) void add_squares(const float* g, double* sums) {
  for (int64_t lane = 0; lane < LANES; ++lane) sums[lane] += (double)g[lane] * (double)g[lane];
}

static sluice_adam_scan_t scan(const void* grad, int32_t dtype, int64_t first, int64_t count) {
  float room[BLOCK];
  double sums[LANES] = {0.0};
  uint32_t largest[LANES] = {0};
  for (int64_t end = first + count, size; first < end; first += size) {
    size = dtype == SLUICE_DTYPE_F32 ? end - first : sluice_min(BLOCK, end - first);
    const float* g = as_f32(grad, dtype, first, size, room);
    float rest[LANES] = {0.0F}; /* zeros change neither sums nor magnitudes */
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      take_largest(g + i, LANES, largest);
      add_squares(g + i, sums);
    }
    memcpy(rest, g + i, (size_t)(size - i) * sizeof *g);
    take_largest(rest, LANES, largest);
    add_squares(rest, sums);
  }
  double sum = 0.0;
  for (int64_t lane = 0; lane < LANES; ++lane) sum += sums[lane];
  return found_of(sum, largest, LANES);
}

/* Indexed by sluice_adam_arithmetic_t. */
#define KERNELS_OF(NAME)                                                 \
  {                                                                      \
    {(NAME), update, scan, scan}, { (NAME), update_rounded, scan, look } \
  }
