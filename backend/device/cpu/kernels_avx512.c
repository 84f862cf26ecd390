// SPDX-License-Identifier: Apache-2.0
/* Primitives with 16 lanes (AVX-512 F, BW, DQ, VL), and the kernels compiled with them. */
#include "backend/device/cpu/kernels_paths.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "backend/base/dtype.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif

#define LANES  16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

INLINE vf vf_set1(float x) { return (vf)_mm512_set1_ps(x); }
/* Returns a * b + c, rounded once. */
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
/* Return the maximum and the minimum; b if either is NaN. */
INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vf_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
/* Returns, lane by lane, a if the sign bit of x is set, else b. */
INLINE vf vf_pick_negative(vf x, vf a, vf b) {
  return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)x), (__m512)b, (__m512)a);
}
/* Returns 1 if x > 0, NaN if x is NaN, else 0. */
INLINE vf vf_step(vf x) {
  __mmask16 positive = _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_GT_OQ);
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  return (vf)_mm512_mask_mov_ps(_mm512_maskz_mov_ps(positive, _mm512_set1_ps(1)), nan, (__m512)x);
}

INLINE vf from_bf16(__m256i h) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }

INLINE __m256i to_bf16(vf x) {
  vu bits = (vu)x;
  vu even = bits + 0x7fffu + ((bits >> 16) & 1u);
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  vu quiet = bits | 0x400000u;
  __m512i wide = _mm512_mask_mov_epi32((__m512i)even, nan, (__m512i)quiet);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16));
}

/* Loads elements i to i + LANES - 1 as f32. */
INLINE vf vf_load(int32_t dtype, const void* data, int64_t i) {
  const char* at = (const char*)data + i * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  if (dtype == SLUICE_DTYPE_F32) return (vf)_mm512_loadu_ps(at);
  __m256i h = _mm256_loadu_si256((const __m256i_u*)at);
  return dtype == SLUICE_DTYPE_BF16 ? from_bf16(h) : (vf)_mm512_cvtph_ps(h);
}

INLINE void vf_store(int32_t dtype, void* data, int64_t i, vf x) {
  char* at = (char*)data + i * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  if (dtype == SLUICE_DTYPE_F32) {
    _mm512_storeu_ps(at, (__m512)x);
  } else {
    __m256i h = dtype == SLUICE_DTYPE_BF16 ? to_bf16(x) : _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256((__m256i_u*)at, h);
  }
}

/* Load and store only the first n < LANES of them; the other lanes read as 0 and are not written. */
INLINE vf vf_load_part(int32_t dtype, const void* data, int64_t i, int64_t n) {
  const char* at = (const char*)data + i * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  __mmask16 mask = (__mmask16)((1u << n) - 1u);
  if (dtype == SLUICE_DTYPE_F32) return (vf)_mm512_maskz_loadu_ps(mask, at);
  __m256i h = _mm256_maskz_loadu_epi16(mask, at);
  return dtype == SLUICE_DTYPE_BF16 ? from_bf16(h) : (vf)_mm512_cvtph_ps(h);
}

INLINE void vf_store_part(int32_t dtype, void* data, int64_t i, int64_t n, vf x) {
  char* at = (char*)data + i * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  __mmask16 mask = (__mmask16)((1u << n) - 1u);
  if (dtype == SLUICE_DTYPE_F32) {
    _mm512_mask_storeu_ps(at, mask, (__m512)x);
  } else {
    __m256i h = dtype == SLUICE_DTYPE_BF16 ? to_bf16(x) : _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
    _mm256_mask_storeu_epi16(at, mask, h);
  }
}

#include "backend/device/cpu/kernels_transcendental.inc.h"
#include "backend/device/cpu/kernels_rows.inc.h"
#include "backend/device/cpu/kernels_activation.inc.h"
#include "backend/device/cpu/kernels_table.inc.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const sluice_kernels_t* sluice_cpu_kernels_avx512(void) {
  int available = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("fma");
  return available ? &table : NULL;
}

#else

const sluice_kernels_t* sluice_cpu_kernels_avx512(void) { return NULL; }

#endif
