// SPDX-License-Identifier: Apache-2.0
/* Element types: storage and arithmetic types. bf16 and f16 are converted by integer arithmetic, in both builds the
 * same as in backend/base/dtype.h; the row kernels are bound by memory, not by these. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_KERNELS_ELEMENT_CU_H_
#define SLUICE_BACKEND_DEVICE_CUDA_KERNELS_ELEMENT_CU_H_

#include "backend/device/cuda/kernels/lanes.cu.h"

SLUICE_FN uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}
SLUICE_FN float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

struct f32_type {
  typedef float stored;
  typedef float value;
  static SLUICE_MEMBER float get(stored x) { return x; }
  static SLUICE_MEMBER stored put(float x) { return x; }
};

struct f64_type {
  typedef double stored;
  typedef double value;
  static SLUICE_MEMBER double get(stored x) { return x; }
  static SLUICE_MEMBER stored put(double x) { return x; }
};

struct bf16_type {
  typedef uint16_t stored;
  typedef float value;
  static SLUICE_MEMBER float get(stored x) { return float_of((uint32_t)x << 16); }
  static SLUICE_MEMBER stored put(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct f16_type {
  typedef uint16_t stored;
  typedef float value;
  static SLUICE_MEMBER float get(stored x) {
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    uint32_t exponent = ((uint32_t)x >> 10) & 0x1fu, mantissa = x & 0x3ffu;
    if (exponent == 0x1fu) return float_of(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    return float_of(sign | bits_of((float)mantissa * 5.9604644775390625e-8f)); /* 2^-24 */
  }
  static SLUICE_MEMBER stored put(float x) {
    uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
      /* Subnormal: adding 0.5 aligns the mantissa, so that the addition rounds to nearest even. */
      return (uint16_t)(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
  }
};

template <typename E>
SLUICE_FN typename E::value load(const void* data, int64_t i) {
  return E::get(((const typename E::stored*)data)[i]);
}
template <typename E>
SLUICE_FN void store(void* data, int64_t i, typename E::value x) {
  ((typename E::stored*)data)[i] = E::put(x);
}

/* N elements that are loaded or stored with one access. */
template <typename E, int N>
struct alignas(sizeof(typename E::stored) * N) pack_t {
  typename E::stored x[N];
};

template <typename E, int N>
SLUICE_FN pack_t<E, N> load_pack(const void* data, int64_t i) {
  return *(const pack_t<E, N>*)((const typename E::stored*)data + i);
}
template <typename E, int N>
SLUICE_FN void store_pack(void* data, int64_t i, const pack_t<E, N>& p) {
  *(pack_t<E, N>*)((typename E::stored*)data + i) = p;
}

/* Elements in 16 bytes. */
template <typename E>
struct wide_of {
  enum { N = (int)(16 / sizeof(typename E::stored)) };
};

/* One kernel per dtype from a body `name<E>`. */
#define SLUICE_KERNELS_BY_DTYPE(name, args_t)                                             \
  SLUICE_FN void name##_f32(const args_t& a, int64_t unit) { name<f32_type>(a, unit); }   \
  SLUICE_FN void name##_bf16(const args_t& a, int64_t unit) { name<bf16_type>(a, unit); } \
  SLUICE_FN void name##_f16(const args_t& a, int64_t unit) { name<f16_type>(a, unit); }   \
  SLUICE_FN void name##_f64(const args_t& a, int64_t unit) { name<f64_type>(a, unit); }   \
  SLUICE_KERNEL(name##_f32, args_t)                                                       \
  SLUICE_KERNEL(name##_bf16, args_t)                                                      \
  SLUICE_KERNEL(name##_f16, args_t)                                                       \
  SLUICE_KERNEL(name##_f64, args_t)

#endif /* SLUICE_BACKEND_DEVICE_CUDA_KERNELS_ELEMENT_CU_H_ */
