// SPDX-License-Identifier: Apache-2.0
/* Shared by the files for processors with AVX-512: loads and stores of any dtype as f32, a transposition, and decoding
 * of packed weights. Each file includes it after its target attribute. Internal to backend/gemm/native. */

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
typedef __m512 vf;
typedef __mmask16 lanes_t;

/* ---- elements of any dtype as f32 ------------------------------------------------------------------------------ */

INLINE __m512 from_bf16(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }

#ifdef ROUNDS_BY_INSTRUCTION /* as below, except that subnormal numbers become zeros */
INLINE __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
INLINE __m256i to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i wide = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16));
}
#endif

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

/* Transposes 16 x 16: lane k of r[i] becomes lane i of r[k]. */
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
  /* Quarter q of r[4 g + c] is now column 4 q + c of rows 4 g .. 4 g + 3. */
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

/* ---- packed weights --------------------------------------------------------------------------------------------- */

typedef __m512i codes_t;
#define HAS_TABLE(format) ((format) == SLUICE_PACKED_MXFP4 || (format) == SLUICE_PACKED_INT4)

INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }

/* Does not use the instruction that flushes subnormal numbers to zero. */
INLINE vf rounded(const int32_t dtype, vf x) {
  if (dtype == SLUICE_DTYPE_F16) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  if (dtype != SLUICE_DTYPE_BF16) return x;
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i picked = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_castsi512_ps(_mm512_and_epi32(picked, _mm512_set1_epi32((int)0xffff0000)));
}

INLINE __m256i upper_halves(vf x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16)); }

INLINE void store_exact(const int32_t dtype, void* at, vf x) {
  if (dtype == SLUICE_DTYPE_BF16) {
    _mm256_storeu_si256(at, upper_halves(x));
  } else {
    store(dtype, at, (lanes_t)0xffff, x);
  }
}

/* The codes are in the lowest bits of the dwords; with 4 bits there are other codes above them. */
INLINE codes_t lanes_of_codes(const int32_t format, const uint8_t* at, int64_t left) {
  if (format == SLUICE_PACKED_MXFP4 || format == SLUICE_PACKED_INT4) {
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    if (left >= LANES) { /* broadcasts from memory, which leave the port for permutations to the table */
      uint32_t low, high;
      memcpy(&low, at, sizeof low);
      memcpy(&high, at + sizeof low, sizeof high);
      const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)low), 0xff00, (int)high);
      return _mm512_srlv_epi32(both, shifts);
    }
    const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)(first_lanes((left + 1) / 2) & 0xff), at);
    const __m512i dwords = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                                    _mm512_castsi128_si512(bytes));
    return _mm512_srlv_epi32(dwords, shifts);
  }
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first_lanes(left), at));
}

INLINE vf values_of(const int32_t format, codes_t codes) {
  if (format == SLUICE_PACKED_INT8) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(codes, 24), 24));
  }
  const __m512i low = _mm512_and_epi32(codes, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_epi32(codes, _mm512_set1_epi32(0x80)), 8);
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_or_epi32(_mm512_slli_epi32(low, 7), sign));
  const vf x = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256));
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(low, _mm512_set1_epi32(0x7f));
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(x), nan, _mm512_set1_epi32(0x7fc00000)));
}

/* The values of all 16 codes, without a scale. */
INLINE vf unscaled_table(const int32_t format) {
  const vf mxfp4 = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  const vf int4 = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return format == SLUICE_PACKED_MXFP4 ? mxfp4 : int4;
}

INLINE vf table_of(const int32_t format, const int32_t dtype, vf scale) {
  return rounded(dtype, _mm512_mul_ps(unscaled_table(format), scale));
}

INLINE vf look_up(const int32_t format, vf table, codes_t codes) {
  (void)format;
  return _mm512_permutexvar_ps(codes, table);
}

/* The bf16 of all 16 codes, twice: an index of a word has five bits, of which four are the code. */
#define HAS_WORDS 1
typedef __m512i words_t;

INLINE words_t words_of(const int32_t format, const char* scales, int64_t block);

/* The low half of a byte is the code of an even column, the high half that of the odd column after it. */
INLINE __m512i look_up_bytes(words_t words, __m128i bytes) {
  const __m512i codes = _mm512_cvtepu8_epi32(bytes);
  return _mm512_permutexvar_epi16(_mm512_or_si512(codes, _mm512_slli_epi32(codes, 12)), words);
}

INLINE __m512i look_up_words(words_t words, const uint8_t* at) {
  return look_up_bytes(words, _mm_loadu_si128((const __m128i_u*)at));
}

INLINE void store_words(void* at, __m512i words) { _mm512_storeu_si512(at, words); }

#include "backend/gemm/native/native_decode.inc.h"

/* MXFP4 has a table in memory for each scale; others are computed. */
INLINE words_t words_of(const int32_t format, const char* scales, int64_t block) {
  if (format == SLUICE_PACKED_MXFP4) {
    const uint16_t* table = sluice_native_mxfp4_tables[((const uint8_t*)scales)[block]];
    return _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)(const void*)table));
  }
  return _mm512_broadcast_i64x4(upper_halves(block_of(format, SLUICE_DTYPE_BF16, scales, block)));
}

/* A row of a packed weight. */
typedef struct packed_row_s {
  const uint8_t* codes;
  const char* scales;
  int64_t block_cols;
} packed_row_t;

INLINE packed_row_t packed_row(const sluice_packed_t* packed, const void* data, int64_t ld, int64_t row) {
  const int64_t at = sluice_packed_bytes(bits_of(packed->format), ld, row, 0);
  return (packed_row_t){(const uint8_t*)data + at, sluice_packed_scales(packed, row), packed->block_cols};
}

/* Decodes columns [k, k + LANES) of the row; zeros past `left`. */
INLINE vf decode_row(const int32_t format, int32_t dtype, const packed_row_t* row, int64_t k, int64_t left) {
  const scaled_t block = block_of(format, dtype, row->scales, k / row->block_cols);
  const vf x = decode_lanes(format, dtype, row->codes + k * bits_of(format) / 8, left, block);
  return left >= LANES ? x : _mm512_maskz_mov_ps(first_lanes(left), x);
}

/* Decodes twice as many columns, to bf16. */
INLINE vf decode_pairs(const int32_t format, const packed_row_t* row, int64_t k, int64_t left) {
  const uint8_t* at = row->codes + k * bits_of(format) / 8;
  if (HAS_TABLE(format)) {
    const int64_t number = k / (format == SLUICE_PACKED_MXFP4 ? SLUICE_PACKED_LEAST_COLS : row->block_cols);
    const words_t table = words_of(format, row->scales, number);
    if (left >= 2 * LANES) return _mm512_castsi512_ps(look_up_words(table, at));
    const __m128i bytes = _mm_maskz_loadu_epi8(first_lanes((left + 1) / 2), at);
    return _mm512_castsi512_ps(_mm512_maskz_mov_epi16((1u << left) - 1u, look_up_bytes(table, bytes)));
  }
  const scaled_t block = block_of(format, SLUICE_DTYPE_BF16, row->scales, k / row->block_cols);
  const vf low = decode_lanes(format, SLUICE_DTYPE_BF16, at, left, block);
  const vf high = decode_lanes(format, SLUICE_DTYPE_BF16, at + LANES * bits_of(format) / 8, left - LANES, block);
  __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(upper_halves(low)), upper_halves(high), 1);
  if (left < 2 * LANES) words = _mm512_maskz_mov_epi16((1u << left) - 1u, words);
  return _mm512_castsi512_ps(words);
}
