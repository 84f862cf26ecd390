// SPDX-License-Identifier: Apache-2.0
/* Adam: a unit is a tile of elements, each touched only by its own lane. The rules of backend/optim/adam.h in the order
 * of its loops, with the same fused operations and so the same bits (the build has -fmad=false, and roots and quotients
 * are rounded to nearest). */
#include "backend/device/cuda/kernels/element.cu.h"
#include "backend/device/cuda/kernels/kernel_args.h"

/* Not in f64: master weights are f32. */
#define ADAM_KERNELS(name)                                                                            \
  SLUICE_FN void name##_f32(const sluice_adam_args_t& a, int64_t unit) { name<f32_type>(a, unit); }   \
  SLUICE_FN void name##_bf16(const sluice_adam_args_t& a, int64_t unit) { name<bf16_type>(a, unit); } \
  SLUICE_FN void name##_f16(const sluice_adam_args_t& a, int64_t unit) { name<f16_type>(a, unit); }   \
  SLUICE_KERNEL(name##_f32, sluice_adam_args_t)                                                       \
  SLUICE_KERNEL(name##_bf16, sluice_adam_args_t)                                                      \
  SLUICE_KERNEL(name##_f16, sluice_adam_args_t)

SLUICE_FN int64_t adam_end(const sluice_adam_args_t& a, int64_t unit) {
  const int64_t end = (unit + 1) * SLUICE_CUDA_ADAM_TILE;
  return end < a.count ? end : a.count;
}

/* Every lane that finds such an element writes the same word. */
template <typename E>
SLUICE_FN void adam_look(const sluice_adam_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    bool is_bad = false, is_large = false;
    for (int64_t i = unit * SLUICE_CUDA_ADAM_TILE + lane; i < adam_end(a, unit); i += 32) {
      const float g = (float)load<E>(a.grad, i);
      is_bad = is_bad || (bits_of(g) & 0x7f800000u) == 0x7f800000u;
      is_large = is_large || g > a.limit || g < -a.limit;
    }
    if (is_bad) a.flags[SLUICE_ADAM_IS_NOT_FINITE] = 1;
    if (is_large) a.flags[SLUICE_ADAM_IS_LARGE] = 1;
  }
}
ADAM_KERNELS(adam_look)

template <typename E>
SLUICE_FN void adam_stage(const sluice_adam_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    for (int64_t i = unit * SLUICE_CUDA_ADAM_TILE + lane; i < adam_end(a, unit); i += 32)
      a.staged[i] = (float)load<E>(a.grad, i);
  }
}
ADAM_KERNELS(adam_stage)

template <typename E>
SLUICE_FN void adam_sum(const sluice_adam_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    for (int64_t i = unit * SLUICE_CUDA_ADAM_TILE + lane; i < adam_end(a, unit); i += 32) {
      float sum = (float)load<E>(a.grad, i);
      for (int32_t part = 1; part < a.num_parts; ++part) sum += (float)load<E>(a.grad, part * a.stride + i);
      a.staged[i] = sum;
    }
  }
}
ADAM_KERNELS(adam_sum)

SLUICE_FN float adam_moved(const sluice_adam_args_t& a, float p, float m, float v) {
  const float s = sqrtf(v), d = s + a.epsilon_high, rest = d - s;
  const float lost_in_sum = (s - (d - rest)) + (a.epsilon_high - rest) + a.epsilon_low;
  const float reciprocal = 1.0f / d, q = m * reciprocal;
  const float lost_in_root = fmaf(-s, s, v) * reciprocal;
  const float d_low = fmaf(0.5f, lost_in_root, lost_in_sum);
  const float q_low = fmaf(-q, d_low, fmaf(-q, d, m)) * reciprocal;
  const float small = fmaf(a.step_high, q_low, fmaf(a.step_low, q, a.decay * p));
  const bool is_finite = (bits_of(small) & 0x7f800000u) != 0x7f800000u;
  return fmaf(-a.step_high, q, is_finite ? p - small : p * (1.0f - a.decay));
}

template <typename E>
SLUICE_FN void adam_update(const sluice_adam_args_t& a, int64_t unit) {
  SLUICE_LANES(lane) {
    for (int64_t i = unit * SLUICE_CUDA_ADAM_TILE + lane; i < adam_end(a, unit); i += 32) {
      const float p = a.master[i], scaled = a.staged[i] * a.grad_scale, v_was = a.exp_avg_sq[i];
      const float g = a.l2 != 0.0f ? fmaf(a.l2, p, scaled) : scaled;
      const float m = fmaf(a.one_minus_beta1, g, fmaf(-a.one_minus_beta1, a.exp_avg[i], a.exp_avg[i]));
      const float v_kept = bits_of(v_was) != 0x7f800000u ? fmaf(-a.one_minus_beta2, v_was, v_was) : v_was;
      const float v = fmaf(a.one_minus_beta2 * g, g, v_kept);
      const float moved = adam_moved(a, p, m, v);
      a.exp_avg[i] = m;
      a.exp_avg_sq[i] = v;
      a.master[i] = moved;
      store<E>(a.param, i, (typename E::value)moved);
    }
  }
}
ADAM_KERNELS(adam_update)
