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
  KEPT = 512, /* elements that one step of a scan reads */
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

/* Prefetches all four arrays. The arithmetic of a strip takes as long as its memory traffic, and the hardware
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

/* The running result of a scan, in compiler vectors that stay in registers. */
typedef double lane_sums_t __attribute__((vector_size(LANES * sizeof(double))));
typedef float lane_floats_t __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef int32_t lane_bits_t __attribute__((vector_size(LANES * sizeof(int32_t)))); /* magnitude bits, never negative */

/* Prefetches an address that may be past the end of the array. It is computed as an integer, since such a pointer would
 * be undefined behaviour. */
static inline void ask_for(const float* g, int64_t at) {
  __builtin_prefetch((const void*)((uintptr_t)g + (uintptr_t)at * sizeof *g), 0);
}

/* lines: units of LANES elements. The square of an f32 is exact in f64. */
static void scan_lines(const float* g, int64_t lines, lane_sums_t* sums, lane_bits_t* largest) {
  lane_sums_t squares = *sums;
  lane_bits_t most = *largest;
  for (int64_t line = 0; line < lines; ++line) {
    ask_for(g, line * LANES + 4 * AHEAD);
    const lane_floats_t x = *(const lane_floats_t*)(const void*)(g + line * LANES);
    const lane_sums_t wide = __builtin_convertvector(x, lane_sums_t);
    squares += wide * wide;
    const lane_bits_t bits = (lane_bits_t)x & 0x7fffffff, is_above = bits > most;
    most = (bits & is_above) | (most & ~is_above);
  }
  *sums = squares;
  *largest = most;
}

/* Finds only the largest magnitude, several vectors at once: a fifth of the arithmetic of a scan. */
static sluice_adam_scan_t look(const void* grad, int32_t dtype, int64_t first, int64_t count) {
  enum { LINES = 4 * LANES };
  float room[BLOCK];
  uint32_t largest[LINES] = {0}, most = 0;
  for (int64_t end = first + count; first < end; first += BLOCK) {
    const int64_t size = sluice_min(BLOCK, end - first);
    const float* g = as_f32(grad, dtype, first, size, room);
    int64_t i = 0;
    for (; i + LINES <= size; i += LINES) {
      for (int64_t line = 0; line < LINES; line += LANES) ask_for(g, i + line + 4 * AHEAD);
      for (int64_t lane = 0; lane < LINES; ++lane) {
        const uint32_t bits = magnitude_bits(g[i + lane]);
        largest[lane] = bits > largest[lane] ? bits : largest[lane];
      }
    }
    for (; i < size; ++i) {
      const uint32_t bits = magnitude_bits(g[i]);
      most = bits > most ? bits : most;
    }
  }
  for (int64_t lane = 0; lane < LINES; ++lane) most = largest[lane] > most ? largest[lane] : most;
  sluice_adam_scan_t found = {.sum_of_squares = 0.0, .largest = INFINITY};
  if (most < BITS_OF_INFINITY) memcpy(&found.largest, &most, sizeof most);
  return found;
}

static sluice_adam_scan_t scan(const void* grad, int32_t dtype, int64_t first, int64_t count) {
  float room[BLOCK];
  lane_sums_t sums = {0.0};
  lane_bits_t largest = {0};
  for (int64_t end = first + count; first < end; first += BLOCK) {
    const int64_t size = dtype == SLUICE_DTYPE_F32 ? end - first : sluice_min(BLOCK, end - first);
    const float* g = as_f32(grad, dtype, first, size, room);
    float rest[LANES] = {0.0F}; /* zeros do not change the sums */
    scan_lines(g, size / LANES, &sums, &largest);
    memcpy(rest, g + size / LANES * LANES, (size_t)(size % LANES) * sizeof *g);
    if (size % LANES > 0) scan_lines(rest, 1, &sums, &largest);
    if (dtype == SLUICE_DTYPE_F32) break;
  }
  sluice_adam_scan_t found = {.sum_of_squares = 0.0, .largest = INFINITY};
  int32_t most = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) {
    found.sum_of_squares += sums[lane];
    most = largest[lane] > most ? largest[lane] : most;
  }
  if (most < (int32_t)BITS_OF_INFINITY) memcpy(&found.largest, &most, sizeof most);
  return found;
}

/* Indexed by sluice_adam_arithmetic_t. */
#define KERNELS_OF(NAME)                                                 \
  {                                                                      \
    {(NAME), update, scan, scan}, { (NAME), update_rounded, scan, look } \
  }
