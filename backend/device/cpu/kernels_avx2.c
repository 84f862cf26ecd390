// SPDX-License-Identifier: Apache-2.0
/* Primitives with 8 lanes (AVX2, FMA, F16C), and the kernels compiled with them. */
#include "backend/device/cpu/kernels_paths.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#include "backend/base/dtype.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define LANES  8
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));

/* kernels_avx512.c documents each of these. */
INLINE vf vf_set1(float x) { return (vf)_mm256_set1_ps(x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vf_min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vf vf_pick_negative(vf x, vf a, vf b) { return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)x); }
INLINE vf vf_step(vf x) {
  __m256 positive = _mm256_cmp_ps((__m256)x, _mm256_setzero_ps(), _CMP_GT_OQ);
  __m256 nan = _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q);
  return (vf)_mm256_or_ps(_mm256_and_ps(positive, _mm256_set1_ps(1)), _mm256_and_ps(nan, (__m256)x));
}

INLINE vf from_bf16(__m128i h) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16); }

INLINE __m128i to_bf16(vf x) {
  vu bits = (vu)x;
  vu even = bits + 0x7fffu + ((bits >> 16) & 1u);
  vu quiet = bits | 0x400000u;
  __m256 nan = _mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q);
  __m256i wide = _mm256_srli_epi32((__m256i)_mm256_blendv_ps((__m256)even, (__m256)quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

INLINE vf vf_load(int32_t dtype, const void* data, int64_t i) {
  const char* at = (const char*)data + i * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  if (dtype == SLUICE_DTYPE_F32) return (vf)_mm256_loadu_ps((const float*)at);
  __m128i h = _mm_loadu_si128((const __m128i_u*)at);
  return dtype == SLUICE_DTYPE_BF16 ? from_bf16(h) : (vf)_mm256_cvtph_ps(h);
}

INLINE void vf_store(int32_t dtype, void* data, int64_t i, vf x) {
  char* at = (char*)data + i * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  if (dtype == SLUICE_DTYPE_F32) {
    _mm256_storeu_ps((float*)at, (__m256)x);
  } else {
    __m128i h = dtype == SLUICE_DTYPE_BF16 ? to_bf16(x) : _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i_u*)at, h);
  }
}

#include "backend/device/cpu/kernels_part.inc.h"
#include "backend/device/cpu/kernels_transcendental.inc.h"
#include "backend/device/cpu/kernels_rows.inc.h"
#include "backend/device/cpu/kernels_activation.inc.h"
#include "backend/device/cpu/kernels_table.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const sluice_kernels_t* sluice_cpu_kernels_avx2(void) {
  /* F16C is bit 29 of ecx; clang has no name for it here. */
  unsigned a = 0, b = 0, c = 0, d = 0;
  int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);
  int available = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return available ? &table : NULL;
}

#else

const sluice_kernels_t* sluice_cpu_kernels_avx2(void) { return NULL; }

#endif
