// SPDX-License-Identifier: Apache-2.0
/* Element types: sizes, names, and the scalar conversions of bf16 and f16. */
#pragma once

#include <string.h>

#include "sluice/base.h"

/* Returns the bytes of one element; 0 for an unknown dtype. */
static inline uint64_t sluice_dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case SLUICE_DTYPE_F32:
    case SLUICE_DTYPE_I32: return 4;
    case SLUICE_DTYPE_BF16:
    case SLUICE_DTYPE_F16: return 2;
    case SLUICE_DTYPE_F64:
    case SLUICE_DTYPE_I64: return 8;
    default: return 0;
  }
}

static inline const char* sluice_dtype_name(int32_t dtype) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: return "f32";
    case SLUICE_DTYPE_I32: return "i32";
    case SLUICE_DTYPE_BF16: return "bf16";
    case SLUICE_DTYPE_F16: return "f16";
    case SLUICE_DTYPE_F64: return "f64";
    case SLUICE_DTYPE_I64: return "i64";
    default: return "unknown";
  }
}

static inline float sluice_bf16_to_f32(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

/* Rounds to nearest even; NaN stays NaN. */
static inline uint16_t sluice_f32_to_bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* Converts IEEE half in integer arithmetic, so that it needs no compiler support. */
static inline float sluice_f16_to_f32(uint16_t x) {
  uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
  uint32_t exponent = (x >> 10) & 0x1fu;
  uint32_t mantissa = x & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1fu) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  } else {
    /* Subnormal: mantissa * 2^-24, exact in f32. */
    float f = (float)mantissa * 5.9604644775390625e-8f;
    memcpy(&bits, &f, sizeof bits);
    bits |= sign;
  }
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline uint16_t sluice_f32_to_f16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to infinity */
  if (magnitude < 0x38800000u) {
    /* Subnormal result: adding 0.5 aligns the mantissa so that the hardware rounds to nearest even. */
    float g;
    memcpy(&g, &magnitude, sizeof g);
    g += 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &g, sizeof rounded);
    return (uint16_t)(sign | (rounded - 0x3f000000u));
  }
  uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}
