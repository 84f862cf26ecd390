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

enum { LANES = 16, WIDTH = 2 * LANES, MAX_ROWS = 14, LINE = 64, AHEAD = 8 };

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
INLINE __m512 load(int32_t dtype, const void* at, __mmask16 mask) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return from_bf16(_mm256_maskz_loadu_epi16(mask, at));
    case SLUICE_DTYPE_F16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at));
    default: return _mm512_maskz_loadu_ps(mask, at);
  }
}

INLINE void store(int32_t dtype, void* at, __mmask16 mask, __m512 x) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: _mm256_mask_storeu_epi16(at, mask, to_bf16(x)); break;
    case SLUICE_DTYPE_F16:
      _mm256_mask_storeu_epi16(at, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      break;
    default: _mm512_mask_storeu_ps(at, mask, x); break;
  }
}

INLINE __mmask16 first_lanes(int64_t count) {
  return count >= LANES ? (__mmask16)0xffff : count <= 0 ? (__mmask16)0 : (__mmask16)((1u << count) - 1u);
}

/* ---- tiles ----------------------------------------------------------------------------------------------------- */

#define EACH_ROW(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)

#define ZERO(i)                         \
  __m512 left##i = _mm512_setzero_ps(); \
  __m512 right##i = _mm512_setzero_ps();
#define LOAD_AS(dtype, i)                                                  \
  if (rows > (i)) {                                                        \
    left##i = load(dtype, start + (i)*start_bytes, left_mask);             \
    right##i = load(dtype, start + (i)*start_bytes + half_in, right_mask); \
  }
#define LOAD_F32(i)  LOAD_AS(SLUICE_DTYPE_F32, i)
#define LOAD_BF16(i) LOAD_AS(SLUICE_DTYPE_BF16, i)
#define LOAD_F16(i)  LOAD_AS(SLUICE_DTYPE_F16, i)
#define STORE_AS(dtype, i)                                              \
  if (rows > (i)) {                                                     \
    store(dtype, out + (i)*out_bytes, left_mask, left##i);              \
    store(dtype, out + (i)*out_bytes + half_out, right_mask, right##i); \
  }
#define STORE_F32(i)  STORE_AS(SLUICE_DTYPE_F32, i)
#define STORE_BF16(i) STORE_AS(SLUICE_DTYPE_BF16, i)
#define STORE_F16(i)  STORE_AS(SLUICE_DTYPE_F16, i)
#define MULTIPLY(i)                              \
  if (rows > (i)) {                              \
    const __m512 x = _mm512_set1_ps(a[i]);       \
    left##i = _mm512_fmadd_ps(x, b0, left##i);   \
    right##i = _mm512_fmadd_ps(x, b1, right##i); \
  }
/* One step of k. With raw, packing costs no pass of its own: its loads and stores go beside the multiply-adds. Rows of
 * B lie a page apart: each is asked for AHEAD steps before, from where the driver's prefetch has brought it. */
#define STEP                                               \
  {                                                        \
    __m512 b0, b1;                                         \
    if (packs) {                                           \
      b0 = _mm512_maskz_loadu_ps(left_mask, raw);          \
      b1 = _mm512_maskz_loadu_ps(right_mask, raw + LANES); \
      _mm512_store_ps(b, b0);                              \
      _mm512_store_ps(b + LANES, b1);                      \
      __builtin_prefetch(raw + ahead, 0, 3);               \
      __builtin_prefetch(raw + ahead + LANES, 0, 3);       \
      raw += raw_ld;                                       \
    } else {                                               \
      b0 = _mm512_load_ps(b);                              \
      b1 = _mm512_load_ps(b + LANES);                      \
    }                                                      \
    EACH_ROW(MULTIPLY)                                     \
    a += rows;                                             \
    b += WIDTH;                                            \
  }

INLINE void tile_of(const int rows, const int packs, const sluice_native_tile_t* t,
                    sluice_native_prefetch_t* prefetch) {
  const __mmask16 left_mask = first_lanes(t->cols);
  const __mmask16 right_mask = first_lanes(t->cols - LANES);
  EACH_ROW(ZERO)
  if (t->start != NULL) {
    const char* start = t->start;
    const int64_t bytes = t->start_dtype == SLUICE_DTYPE_F32 ? 4 : 2;
    const int64_t start_bytes = t->start_ld * bytes;
    const int64_t half_in = LANES * bytes;
    if (t->start_dtype == SLUICE_DTYPE_F32) {
      EACH_ROW(LOAD_F32)
    } else if (t->start_dtype == SLUICE_DTYPE_BF16) {
      EACH_ROW(LOAD_BF16)
    } else {
      EACH_ROW(LOAD_F16)
    }
  }
  const float* a = t->a;
  float* b = t->b;
  const float* raw = t->raw;
  const int64_t raw_ld = t->raw_ld;
  const int64_t ahead = AHEAD * raw_ld;
  const char* next = t->next_out;
  int64_t next_rows = next == NULL ? 0 : rows;
  int64_t k = t->depth;
  /* Copies: the compiler would keep them in memory, which costs a tenth at 128 rows. */
  const char* at = prefetch->at;
  int64_t line = prefetch->line;
  int64_t left = prefetch->left;
  const int64_t per_step = prefetch->per_step;
  for (; k >= SLUICE_NATIVE_STEP; k -= SLUICE_NATIVE_STEP) {
    STEP STEP STEP STEP STEP STEP STEP STEP if (next_rows > 0) {
      __builtin_prefetch(next, 1, 3);
      __builtin_prefetch(next + LINE, 1, 3);
      next += t->next_out_bytes;
      --next_rows;
    }
    if (left > 0) {
      left -= per_step;
      int64_t count = per_step;
      do {
        __builtin_prefetch(at, 0, 2);
        at += LINE;
        if (--line == 0) {
          line = prefetch->lines;
          at += prefetch->skip;
        }
      } while (--count > 0);
    }
  }
  prefetch->at = at;
  prefetch->line = line;
  prefetch->left = left;
  for (; k > 0; --k)
    STEP

        char* out = t->out;
  const int64_t bytes = t->out_dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  const int64_t out_bytes = t->out_ld * bytes;
  const int64_t half_out = LANES * bytes;
  if (t->out_dtype == SLUICE_DTYPE_F32) {
    EACH_ROW(STORE_F32)
  } else if (t->out_dtype == SLUICE_DTYPE_BF16) {
    EACH_ROW(STORE_BF16)
  } else {
    EACH_ROW(STORE_F16)
  }
}

#define TILE(rows)                                                                                \
  static void tile_##rows(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) { \
    tile_of(rows, 0, tile, prefetch);                                                             \
  }                                                                                               \
  static void pack_##rows(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) { \
    tile_of(rows, 1, tile, prefetch);                                                             \
  }
/* clang-format off */
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
    /* clang-format on */

    static void run_tile(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch) {
  static void (*const tiles[2][MAX_ROWS])(const sluice_native_tile_t*, sluice_native_prefetch_t*) = {
      {tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12, tile_13,
       tile_14},
      {pack_1, pack_2, pack_3, pack_4, pack_5, pack_6, pack_7, pack_8, pack_9, pack_10, pack_11, pack_12, pack_13,
       pack_14},
  };
  tiles[tile->raw != NULL][tile->rows - 1](tile, prefetch);
}

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
