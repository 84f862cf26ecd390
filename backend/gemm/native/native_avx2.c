// SPDX-License-Identifier: Apache-2.0
/* Kernels of "native" for AVX2 with FMA and F16C: tiles of up to 6 rows and 16 columns, whose sums take 12 of the 16
 * registers. Masks are slow in AVX2, so tiles are whole; those at the right edge of C are computed in a buffer. */
#include "backend/gemm/native/native_kernels.h"

#include <stddef.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#include "backend/base/dtype.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,prfchw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,prfchw")
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 8, MAX_ROWS = 6 };
#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define READS_RAW   1

typedef __m256 vf;
typedef int lanes_t; /* not used: always all lanes */

/* ---- elements of any dtype as f32 ------------------------------------------------------------------------------ */

INLINE vf from_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }

/* Rounds to bf16 in the upper half of each lane; the lower half has no meaning. */
INLINE vf to_upper(vf x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const vf nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_ps(_mm256_castsi256_ps(even), _mm256_castsi256_ps(quiet), nan);
}

INLINE __m128i to_bf16(vf x) {
  const __m256i wide = _mm256_srli_epi32(_mm256_castps_si256(to_upper(x)), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

INLINE lanes_t first_lanes(int64_t count) {
  (void)count;
  return 1;
}

INLINE vf load(int32_t dtype, const void* at, lanes_t all) {
  (void)all;
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return from_bf16(_mm_loadu_si128(at));
    case SLUICE_DTYPE_F16: return _mm256_cvtph_ps(_mm_loadu_si128(at));
    default: return _mm256_loadu_ps(at);
  }
}

INLINE void store(int32_t dtype, void* at, lanes_t all, vf x) {
  (void)all;
  switch (dtype) {
    case SLUICE_DTYPE_BF16: _mm_storeu_si128(at, to_bf16(x)); break;
    case SLUICE_DTYPE_F16:
      _mm_storeu_si128(at, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      break;
    default: _mm256_storeu_ps(at, x); break;
  }
}

INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_load(const float* at) { return _mm256_load_ps(at); }
INLINE void vf_store(float* at, vf x) { _mm256_store_ps(at, x); }

/* Loads up to three 16-bit elements, and zeros for the rest; reads no byte beyond them. */
INLINE uint64_t few_halves(const char* at, int64_t count) {
  uint16_t last = 0;
  uint32_t pair = 0;
  if (count & 1) memcpy(&last, at + (count - 1) * 2, sizeof last);
  if (!(count & 2)) return last;
  memcpy(&pair, at, sizeof pair);
  return pair | (uint64_t)last << 32;
}

/* Loads the first `count` elements, and zeros for the rest; reads nothing beyond them. */
INLINE vf load_first(int32_t dtype, const char* at, int64_t count) {
  if (count >= LANES) return load(dtype, at, 1);
  if (count <= 0) return vf_zero();
  if (dtype == SLUICE_DTYPE_F32) {
    const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps((const float*)at, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), place));
  }
  uint64_t low = 0;
  uint64_t high = 0;
  if (count >= 4) {
    memcpy(&low, at, sizeof low);
    high = few_halves(at + sizeof low, count - 4);
  } else {
    low = few_halves(at, count);
  }
  const __m128i h = _mm_set_epi64x((long long)high, (long long)low);
  return dtype == SLUICE_DTYPE_BF16 ? from_bf16(h) : _mm256_cvtph_ps(h);
}

#include "backend/gemm/native/native_tile.inc.h"

/* ---- packed weights --------------------------------------------------------------------------------------------- */

typedef __m256i codes_t;
#define HAS_TABLE(format) ((format) == SLUICE_PACKED_MXFP4)
#define HAS_WORDS         0

INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }

INLINE vf rounded(const int32_t dtype, vf x) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return _mm256_and_ps(to_upper(x), _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
    case SLUICE_DTYPE_F16: return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    default: return x;
  }
}

INLINE void store_exact(const int32_t dtype, void* at, vf x) {
  if (dtype != SLUICE_DTYPE_BF16) {
    store(dtype, at, 1, x);
    return;
  }
  const __m256i wide = _mm256_srli_epi32(_mm256_castps_si256(x), 16);
  _mm_storeu_si128(at, _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}

/* The codes are in the lowest bits of the dwords; with 4 bits there are others above them. */
INLINE codes_t lanes_of_codes(const int32_t format, const uint8_t* at, int64_t left) {
  const int is_nibbles = format == SLUICE_PACKED_MXFP4 || format == SLUICE_PACKED_INT4;
  if (is_nibbles) {
    uint32_t eight = 0;
    if (left >= LANES) {
      memcpy(&eight, at, sizeof eight);
    } else {
      memcpy(&eight, at, (size_t)(left + 1) / 2);
    }
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_srlv_epi32(_mm256_set1_epi32((int)eight), shifts);
  }
  uint64_t eight = 0;
  if (left >= LANES) {
    memcpy(&eight, at, sizeof eight);
  } else {
    memcpy(&eight, at, (size_t)left);
  }
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)eight));
}

/* Ignores the bits above the codes. */
INLINE vf values_of(const int32_t format, codes_t codes) {
  if (format == SLUICE_PACKED_INT4) return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(codes, 28), 28));
  if (format == SLUICE_PACKED_INT8) return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(codes, 24), 24));
  const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 8);
  const __m256i wide = _mm256_or_si256(_mm256_slli_epi32(low, 7), sign);
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  const vf nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(low, _mm256_set1_epi32(0x7f)));
  return _mm256_or_ps(_mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256)), nan);
}

/* The table of e2m1 without the sign: as many magnitudes as lanes. */
INLINE vf table_of(const int32_t format, const int32_t dtype, vf scale) {
  (void)format;
  return rounded(dtype, _mm256_mul_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), scale));
}

INLINE vf look_up(const int32_t format, vf table, codes_t codes) {
  (void)format;
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
  return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, codes), _mm256_castsi256_ps(sign));
}

#include "backend/gemm/native/native_decode.inc.h"

/* ---- packing --------------------------------------------------------------------------------------------------- */

/* Transposes a block of 8 rows of four dwords, whose rows i and i + 4 are the halves of r[i]: r[k] becomes dword k of
 * rows 0 .. 7. Each shuffle serves two results, since many processors have only one port for shuffles. */
INLINE void transpose_4(__m256 r[4]) {
  const __m256 t0 = _mm256_unpacklo_ps(r[0], r[1]), t1 = _mm256_unpackhi_ps(r[0], r[1]);
  const __m256 t2 = _mm256_unpacklo_ps(r[2], r[3]), t3 = _mm256_unpackhi_ps(r[2], r[3]);
  const __m256 x = _mm256_shuffle_ps(t0, t2, 0x4e), y = _mm256_shuffle_ps(t1, t3, 0x4e);
  r[0] = _mm256_blend_ps(t0, x, 0xcc);
  r[1] = _mm256_blend_ps(t2, x, 0x33);
  r[2] = _mm256_blend_ps(t1, y, 0xcc);
  r[3] = _mm256_blend_ps(t3, y, 0x33);
}

INLINE vf joined(__m128 low, __m128 high) { return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1); }

/* r[k][i] = in[i][k] for 8 rows and 8 k. */
INLINE void transposed_8(int32_t dtype, const char* at, int64_t row_bytes, vf r[LANES]) {
  if (dtype == SLUICE_DTYPE_BF16) { /* pairs of k are transposed as dwords */
    vf pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      pairs[i] = joined(_mm_loadu_ps((const float*)(at + i * row_bytes)),
                        _mm_loadu_ps((const float*)(at + (i + 4) * row_bytes)));
    }
    transpose_4(pairs);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      r[2 * k] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs[k]), 16));
      r[2 * k + 1] = _mm256_and_ps(pairs[k], _mm256_castsi256_ps(_mm256_set1_epi32((int)0xffff0000)));
    }
    return;
  }
  if (dtype == SLUICE_DTYPE_F32) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* low = (const float*)(at + i * row_bytes);
      const float* high = (const float*)(at + (i + 4) * row_bytes);
      r[i] = joined(_mm_loadu_ps(low), _mm_loadu_ps(high));
      r[i + 4] = joined(_mm_loadu_ps(low + 4), _mm_loadu_ps(high + 4));
    }
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const vf low = load(dtype, at + i * row_bytes, 1), high = load(dtype, at + (i + 4) * row_bytes, 1);
      r[i] = _mm256_permute2f128_ps(low, high, 0x20);
      r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
  }
  transpose_4(r);
  transpose_4(r + 4);
}

/* As transposed_8 for fewer rows or fewer k: the others are not read and become zeros. */
INLINE void transposed_part(int32_t dtype, const char* at, int64_t row_bytes, int64_t count, int64_t depth,
                            vf r[LANES]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vf low = i < count ? load_first(dtype, at + i * row_bytes, depth) : vf_zero();
    const vf high = i + 4 < count ? load_first(dtype, at + (i + 4) * row_bytes, depth) : vf_zero();
    r[i] = _mm256_permute2f128_ps(low, high, 0x20);
    r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
  transpose_4(r);
  transpose_4(r + 4);
}

/* Packs up to eight rows into eight lanes of out. */
INLINE void pack_rows_8(int32_t dtype, const char* at, int64_t row_bytes, int64_t count, int64_t depth, float* out,
                        int64_t out_ld) {
  for (; depth > 0; depth -= LANES) {
    vf r[LANES];
    if (count >= LANES && depth >= LANES) {
      transposed_8(dtype, at, row_bytes, r);
    } else {
      transposed_part(dtype, at, row_bytes, count, depth, r);
    }
    if (depth >= LANES) {
#pragma GCC unroll 8
      for (int i = 0; i < LANES; ++i) _mm256_storeu_ps(out + i * out_ld, r[i]);
    } else {
#pragma GCC unroll 8
      for (int i = 0; i < LANES; ++i) {
        if (i < depth) _mm256_storeu_ps(out + i * out_ld, r[i]);
      }
    }
    at += LANES * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
    out += LANES * out_ld;
  }
}

/* Whether lanes 8 .. 15 belong to this row of out, and not to the next. */
INLINE int has_second_half(int64_t count, int64_t out_ld) { return count > LANES || out_ld >= WIDTH; }

INLINE void pack_rows_of(int32_t dtype, const void* in, int64_t in_ld, int64_t count, int64_t depth, float* out,
                         int64_t out_ld) {
  const int64_t row_bytes = in_ld * (dtype == SLUICE_DTYPE_F32 ? 4 : 2);
  pack_rows_8(dtype, in, row_bytes, count, depth, out, out_ld);
  if (!has_second_half(count, out_ld)) return;
  pack_rows_8(dtype, (const char*)in + LANES * row_bytes, row_bytes, count - LANES, depth, out + LANES, out_ld);
}

INLINE void pack_columns_of(int32_t dtype, const void* in, int64_t in_ld, int64_t count, int64_t depth, float* out,
                            int64_t out_ld) {
  const int64_t bytes = dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  const int second = has_second_half(count, out_ld);
  const char* at = in;
  for (int64_t k = 0; k < depth; ++k) {
    _mm256_storeu_ps(out, load_first(dtype, at, count));
    if (second) _mm256_storeu_ps(out + LANES, load_first(dtype, at + LANES * bytes, count - LANES));
    at += in_ld * bytes;
    out += out_ld;
  }
}

/* ---- tiles at the right edge ------------------------------------------------------------------------------------ */

/* Computes a tile of fewer than WIDTH columns as a whole tile, from a copy of its part of C into another buffer. */
static void edge_tile(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) {
  char start[MAX_ROWS * WIDTH_BYTES];
  char out[MAX_ROWS * WIDTH_BYTES];
  sluice_native_tile_t whole = *tile;
  if (tile->raw != NULL) {
    pack_columns_of(SLUICE_DTYPE_F32, tile->raw, tile->raw_ld, tile->cols, tile->depth, tile->b, WIDTH);
    whole.raw = NULL;
  }
  if (tile->start != NULL) {
    const uint64_t bytes = sluice_dtype_bytes(tile->start_dtype);
    memset(start, 0, sizeof start);
    for (int32_t i = 0; i < tile->rows; ++i) {
      const char* row = (const char*)tile->start + (uint64_t)(i * tile->start_ld) * bytes;
      memcpy(start + (uint64_t)(i * WIDTH) * bytes, row, (uint64_t)tile->cols * bytes);
    }
    whole.start = start;
    whole.start_ld = WIDTH;
  }
  whole.out = out;
  whole.out_ld = WIDTH;
  whole.cols = WIDTH;
  run_tile(&whole, prefetch);
  const uint64_t bytes = sluice_dtype_bytes(tile->out_dtype);
  for (int32_t i = 0; i < tile->rows; ++i) {
    char* row = (char*)tile->out + (uint64_t)(i * tile->out_ld) * bytes;
    memcpy(row, out + (uint64_t)(i * WIDTH) * bytes, (uint64_t)tile->cols * bytes);
  }
}

static void any_tile(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) {
  if (tile->cols == WIDTH) {
    run_tile(tile, prefetch);
  } else {
    edge_tile(tile, prefetch);
  }
}

/* ---- packed weights decoded in registers ------------------------------------------------------------------------ */

#define FEW_ROWS(X) X(1, 4, 8) X(2, 2, 4) X(3, 1, 2) X(4, 1, 2)

INLINE int few_rows(int64_t m) { return m <= 4 ? (int)m : 0; }

/* Loads 16 bytes of a row; bytes past `left` are not read and become zeros. */
INLINE __m128 bytes_of(const uint8_t* at, int64_t left) {
  if (left >= 16) return _mm_loadu_ps((const float*)(const void*)at);
  uint8_t few[16] = {0};
  if (left > 0) memcpy(few, at, (size_t)left);
  return _mm_loadu_ps((const float*)(const void*)few);
}

INLINE void transposed_words(const uint8_t* const* at, int64_t from, int64_t left, codes_t* words) {
  for (int64_t part = 0; part < 64 && part < left; part += 16, words += 4) {
    vf r[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      r[i] = joined(bytes_of(at[i] + from + part, left - part), bytes_of(at[i + 4] + from + part, left - part));
    }
    transpose_4(r);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) words[i] = _mm256_castps_si256(r[i]);
  }
}

INLINE vf word_values(const int32_t format, codes_t word) {
  if (format != SLUICE_PACKED_MXFP4) return values_of(format, word);
  return look_up(format, _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), word);
}

INLINE codes_t word_shifted(codes_t word, int bits) { return _mm256_srl_epi32(word, _mm_cvtsi32_si128(bits)); }
INLINE vf vf_of_bits(codes_t bits) { return _mm256_castsi256_ps(bits); }
INLINE vf upper_of(codes_t word) { return _mm256_castsi256_ps(_mm256_slli_epi32(word, 16)); }
INLINE void vf_storeu(float* at, vf x) { _mm256_storeu_ps(at, x); }

INLINE vf e8m0_of(codes_t word) {
  const __m256i code = _mm256_and_si256(word, _mm256_set1_epi32(255));
  const __m256i bits = _mm256_max_epu32(_mm256_slli_epi32(code, 23), _mm256_set1_epi32(1 << 22));
  const __m256i nan = _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255));
  return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_and_si256(nan, _mm256_set1_epi32(1 << 22))));
}

INLINE void store_first(int32_t dtype, char* at, int64_t count, vf x) {
  if (count >= LANES) {
    store(dtype, at, 1, x);
    return;
  }
  if (count <= 0) return;
  char out[LANES * FLOAT_BYTES];
  store(dtype, out, 1, x);
  memcpy(at, out, (size_t)count * (dtype == SLUICE_DTYPE_F32 ? 4 : 2));
}

#include "backend/gemm/native/native_packed.inc.h"

static int thin_takes(const sluice_gemm_form_t* f, int32_t dtype_c) {
  (void)dtype_c;
  return packed_takes(f);
}

static void thin_gemm(const sluice_gemm_form_t* f, int32_t dtype, int32_t dtype_c, float beta, int64_t from, int64_t to,
                      float* room, const sluice_gemm_form_t* next, int64_t next_from) {
  (void)next, (void)next_from;
  packed_gemm(f, dtype, dtype_c, beta, from, to, room);
}

static const sluice_native_thin_t thin = {.takes = thin_takes, .room = packed_room, .problem = thin_gemm};

static const sluice_native_kernels_t kernels = {
    .name = "avx2",
    .max_rows = MAX_ROWS,
    .width = WIDTH,
    .unit = 1,
    .tile = any_tile,
    .pack_rows = pack_rows,
    .pack_columns = pack_columns,
    .decode = decode,
    .pack_codes_along = pack_codes_along,
    .pack_codes_across = pack_codes_across,
    .thin = &thin,
};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const sluice_native_kernels_t* sluice_native_avx2(void) {
  /* F16C is bit 29 of ecx; __builtin_cpu_supports of clang does not know its name. */
  unsigned a = 0, b = 0, c = 0, d = 0;
  int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);
  __builtin_cpu_init();
  int available = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return available ? &kernels : NULL;
}

#else

const sluice_native_kernels_t* sluice_native_avx2(void) { return NULL; }

#endif
