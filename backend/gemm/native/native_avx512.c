// SPDX-License-Identifier: Apache-2.0
/* Kernels of "native" for AVX-512: tiles of up to 14 rows and 32 columns, whose sums take 28 of the 32 registers. */
#include "backend/gemm/native/native_kernels.h"

#include <stddef.h>

#if defined(__x86_64__)

#include <immintrin.h>
#include <pthread.h>
#include <string.h>

#include "backend/base/dtype.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prfchw"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prfchw")
#endif

enum { MAX_ROWS = 14, UNIT = 1 };
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define READS_RAW   1

#include "backend/gemm/native/native_zmm.inc.h"

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_load(const float* at) { return _mm512_load_ps(at); }
INLINE void vf_store(float* at, vf x) { _mm512_store_ps(at, x); }

#include "backend/gemm/native/native_tile.inc.h"

/* ---- packing --------------------------------------------------------------------------------------------------- */

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

INLINE vf thin_load(int32_t dtype, const void* at, int64_t left) { return load(dtype, at, first_lanes(left)); }

INLINE vf thin_unpack(const int32_t format, int32_t dtype, const packed_row_t* row, int64_t k, int64_t left) {
  return decode_row(format, dtype, row, k, left);
}

/* ---- packed weights decoded in registers ------------------------------------------------------------------------ */

#define FEW_ROWS(X) X(1, 4, 8) X(2, 4, 8) X(4, 2, 4) X(8, 2, 2)

INLINE int few_rows(int64_t m) { return m <= 2 ? (int)m : m <= 4 ? 4 : m <= 8 ? 8 : 0; }

INLINE void transposed_words(const uint8_t* const* at, int64_t from, int64_t left, codes_t* words) {
  const __mmask64 bytes = left >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1;
  vf r[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) r[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi8(bytes, at[i] + from));
  transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) words[i] = _mm512_castps_si512(r[i]);
}

INLINE vf word_values(const int32_t format, codes_t word) {
  return HAS_TABLE(format) ? look_up(format, unscaled_table(format), word) : values_of(format, word);
}

INLINE codes_t word_shifted(codes_t word, int bits) { return _mm512_srl_epi32(word, _mm_cvtsi32_si128(bits)); }
INLINE vf vf_of_bits(codes_t bits) { return _mm512_castsi512_ps(bits); }
INLINE vf upper_of(codes_t word) { return _mm512_castsi512_ps(_mm512_slli_epi32(word, 16)); }
INLINE void vf_storeu(float* at, vf x) { _mm512_storeu_ps(at, x); }

INLINE vf e8m0_of(codes_t word) {
  const __m512i code = _mm512_and_epi32(word, _mm512_set1_epi32(255));
  const __m512i bits = _mm512_max_epu32(_mm512_slli_epi32(code, 23), _mm512_set1_epi32(1 << 22));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(code, _mm512_set1_epi32(255));
  return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(1 << 22)));
}

INLINE vf load_first(int32_t dtype, const char* at, int64_t count) { return load(dtype, at, first_lanes(count)); }
INLINE void store_first(int32_t dtype, char* at, int64_t count, vf x) { store(dtype, at, first_lanes(count), x); }

#include "backend/gemm/native/native_packed.inc.h"

/* ---- few rows ---------------------------------------------------------------------------------------------------- */

#define THIN_BF16_ALONE 0
#include "backend/gemm/native/native_thin.inc.h"

static int few_takes(const sluice_gemm_form_t* f, int32_t dtype_c) { return packed_takes(f) || thin_takes(f, dtype_c); }
static int64_t few_room(const sluice_gemm_form_t* f) { return packed_takes(f) ? packed_room(f) : thin_room(f); }

static void few_gemm(const sluice_gemm_form_t* f, int32_t dtype, int32_t dtype_c, float beta, int64_t from, int64_t to,
                     float* room, const sluice_gemm_form_t* next, int64_t next_from) {
  if (packed_takes(f)) {
    packed_gemm(f, dtype, dtype_c, beta, from, to, room);
  } else {
    thin_gemm(f, dtype, dtype_c, beta, from, to, room, next, next_from);
  }
}

static const sluice_native_thin_t few = {.takes = few_takes, .room = few_room, .problem = few_gemm};

static const sluice_native_kernels_t kernels = {
    .name = "avx512",
    .max_rows = MAX_ROWS,
    .width = WIDTH,
    .unit = UNIT,
    .tile = run_tile,
    .pack_rows = pack_rows,
    .pack_columns = pack_columns,
    .decode = decode,
    .pack_codes_along = pack_codes_along,
    .pack_codes_across = pack_codes_across,
    .thin = &few,
};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

_Alignas(32) uint16_t sluice_native_mxfp4_tables[256][16];

static void fill_tables(void) {
  for (int scale = 0; scale < 256; ++scale) {
    const uint8_t byte = (uint8_t)scale;
    for (int code = 0; code < 16; ++code) {
      const float value = sluice_packed_code(SLUICE_PACKED_MXFP4, (uint8_t)code);
      sluice_native_mxfp4_tables[scale][code] =
          sluice_f32_to_bf16(value * sluice_packed_scale(SLUICE_PACKED_MXFP4, &byte));
    }
  }
}

const sluice_native_kernels_t* sluice_native_avx512(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, fill_tables);
  __builtin_cpu_init();
  int available = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("fma");
  return available ? &kernels : NULL;
}

#else

const sluice_native_kernels_t* sluice_native_avx512(void) { return NULL; }

#endif
