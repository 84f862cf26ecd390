/* Kernels of "native" for AVX-512: tiles of up to 14 rows and 32 columns, 28 of the 32 registers holding sums. */
#include "backend/gemm/native/native_kernels.h"

#include <stddef.h>

#if defined(__x86_64__)

#include <immintrin.h>

#include "backend/base/dtype.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prfchw"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prfchw")
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, MAX_ROWS = 14 };
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

typedef __m512 vf;
typedef __mmask16 lanes_t;

/* ---- elements of any dtype as f32 ------------------------------------------------------------------------------ */

INLINE __m512 from_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

INLINE __m256i to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i wide = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16));
}

/* Lanes outside the mask are neither read nor written; they read as 0. */
INLINE vf load(int32_t dtype, const void* at, lanes_t mask) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return from_bf16(_mm256_maskz_loadu_epi16(mask, at));
    case SLUICE_DTYPE_F16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at));
    default: return _mm512_maskz_loadu_ps(mask, at);
  }
}

INLINE void store(int32_t dtype, void* at, lanes_t mask, vf x) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: _mm256_mask_storeu_epi16(at, mask, to_bf16(x)); break;
    case SLUICE_DTYPE_F16:
      _mm256_mask_storeu_epi16(at, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      break;
    default: _mm512_mask_storeu_ps(at, mask, x); break;
  }
}

INLINE lanes_t first_lanes(int64_t count) {
  return count >= LANES ? (lanes_t)0xffff : count <= 0 ? (lanes_t)0 : (lanes_t)((1u << count) - 1u);
}

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_load(const float* at) { return _mm512_load_ps(at); }
INLINE void vf_store(float* at, vf x) { _mm512_store_ps(at, x); }

#include "backend/gemm/native/native_tile.inc.h"

/* ---- packing --------------------------------------------------------------------------------------------------- */

/* Transposes 16 x 16: r[i] lane k becomes r[k] lane i. */
INLINE void transpose(__m512 r[LANES]) {
  __m512 t[LANES];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d x0 = _mm512_castps_pd(t[4 * i]), x1 = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d x2 = _mm512_castps_pd(t[4 * i + 2]), x3 = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(x0, x2));
    r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x0, x2));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(x1, x3));
    r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(x1, x3));
  }
  /* r[4 g + c] holds, in its quarter q, column 4 q + c of rows 4 g .. 4 g + 3. */
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512 x0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), x1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
    const __m512 y0 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd), y1 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_f32x4(x0, x1, 0x88);
    t[8 + c] = _mm512_shuffle_f32x4(x0, x1, 0xdd);
    t[4 + c] = _mm512_shuffle_f32x4(y0, y1, 0x88);
    t[12 + c] = _mm512_shuffle_f32x4(y0, y1, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) r[i] = t[i];
}

INLINE void pack_rows_of(int32_t dtype, const void* in, int64_t in_ld, int64_t count, int64_t depth, float* out,
                         int64_t out_ld) {
  const int64_t bytes = dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  const int64_t row_bytes = in_ld * bytes;
  const char* at = in;
  for (; depth > 0; depth -= LANES) {
    const __mmask16 mask = first_lanes(depth);
    __m512 r[LANES];
    if (count == LANES && depth >= LANES) {
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) r[i] = load(dtype, at + i * row_bytes, (__mmask16)0xffff);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) r[i] = i < count ? load(dtype, at + i * row_bytes, mask) : _mm512_setzero_ps();
    }
    transpose(r);
    if (depth >= LANES) {
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) _mm512_storeu_ps(out + i * out_ld, r[i]);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) {
        if (i < depth) _mm512_storeu_ps(out + i * out_ld, r[i]);
      }
    }
    at += LANES * bytes;
    out += LANES * out_ld;
  }
}

static void pack_rows(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                      int64_t out_ld) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: pack_rows_of(SLUICE_DTYPE_BF16, in, in_ld, count, depth, out, out_ld); break;
    case SLUICE_DTYPE_F16: pack_rows_of(SLUICE_DTYPE_F16, in, in_ld, count, depth, out, out_ld); break;
    default: pack_rows_of(SLUICE_DTYPE_F32, in, in_ld, count, depth, out, out_ld); break;
  }
}

INLINE void pack_columns_of(int32_t dtype, const void* in, int64_t in_ld, int64_t count, int64_t depth, float* out,
                            int64_t out_ld) {
  const int64_t row_bytes = in_ld * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  const __mmask16 mask = first_lanes(count);
  const char* at = in;
  for (int64_t k = 0; k < depth; ++k) {
    _mm512_storeu_ps(out, load(dtype, at, mask));
    at += row_bytes;
    out += out_ld;
  }
}

static void pack_columns(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                         int64_t out_ld) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: pack_columns_of(SLUICE_DTYPE_BF16, in, in_ld, count, depth, out, out_ld); break;
    case SLUICE_DTYPE_F16: pack_columns_of(SLUICE_DTYPE_F16, in, in_ld, count, depth, out, out_ld); break;
    default: pack_columns_of(SLUICE_DTYPE_F32, in, in_ld, count, depth, out, out_ld); break;
  }
}

static const sluice_native_kernels_t kernels = {
    .name = "avx512",
    .max_rows = MAX_ROWS,
    .width = WIDTH,
    .tile = run_tile,
    .pack_rows = pack_rows,
    .pack_columns = pack_columns,
};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const sluice_native_kernels_t* sluice_native_avx512(void) {
  __builtin_cpu_init();
  int available = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("fma");
  return available ? &kernels : NULL;
}

#else

const sluice_native_kernels_t* sluice_native_avx512(void) { return NULL; }

#endif
