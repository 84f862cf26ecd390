// SPDX-License-Identifier: Apache-2.0
/* GEMMs of one to four rows with packed weights that lie along k (generation), for AVX2. Included by native_avx2.c
 * after the decoding.
 *
 * To decode rows of B and to transpose what comes out costs more than to multiply a few rows by it. Here codes are
 * transposed, four or eight to a dword, before they are decoded: a register then has the codes of eight rows of B for
 * the same k, each row in a lane of its own with its own scale. Each decoded register meets the elements of A as
 * broadcasts. The sum of an element is the same chain of fused multiply-adds over k as a tile's, and values are rounded
 * as sluice_packed_decode says, so the bits are the same. */

enum {
  THIN_MOST_ROWS = 4,
  THIN_CHUNK = 16, /* bytes of a row of B in a step: of eight rows a register for each four of them */
  THIN_WORDS = THIN_CHUNK / 4,
  THIN_MOST_GROUPS = 4,       /* of eight columns of C */
  THIN_MOST_BYTES = 512 << 10 /* of A in f32 */
};

/* Groups that a tile computes together: enough independent sums to hide the latency of one. */
INLINE int thin_groups(const int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

typedef struct thin_tile_s {
  const sluice_gemm_form_t* f;
  const float* a; /* [rows][k padded to LANES] */
  int64_t a_ld, j0, cols;
  int32_t dtype_ab, dtype_c;
  int starts; /* from C, not from zeros */
} thin_tile_t;

/* Codes of four bits, or of eight: those of eight lanes, the others still above them. */
INLINE vf thin_values(const int32_t format, const int is_f32, int32_t dtype, codes_t word, vf scale) {
  vf values;
  if (format == SLUICE_PACKED_MXFP4) {
    const vf table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    values = look_up(format, table, word); /* which reads four bits of a lane */
  } else {
    const int32_t mask = format == SLUICE_PACKED_INT4 ? 15 : 255;
    values = values_of(format, _mm256_and_si256(word, _mm256_set1_epi32(mask)));
  }
  values = _mm256_mul_ps(values, scale);
  if (is_f32) return values;
  return dtype == SLUICE_DTYPE_BF16 ? rounded(SLUICE_DTYPE_BF16, values) : rounded(SLUICE_DTYPE_F16, values);
}

/* 16 bytes of a row; bytes past `left` are zeros and are not read. */
INLINE __m128i thin_bytes(const uint8_t* at, int64_t left) {
  if (left >= THIN_CHUNK) return _mm_loadu_si128((const __m128i*)(const void*)at);
  uint8_t few[THIN_CHUNK] = {0};
  memcpy(few, at, (size_t)left);
  return _mm_loadu_si128((const __m128i*)(const void*)few);
}

/* words[i]: dword i of the chunks of eight rows. */
INLINE void thin_words(const uint8_t* const* at, int64_t from, int64_t left, codes_t words[THIN_WORDS]) {
  vf pairs[THIN_WORDS];
#pragma GCC unroll 4
  for (int i = 0; i < THIN_WORDS; ++i) {
    pairs[i] =
        joined(_mm_castsi128_ps(thin_bytes(at[i] + from, left)), _mm_castsi128_ps(thin_bytes(at[i + 4] + from, left)));
  }
  transpose_4(pairs);
#pragma GCC unroll 4
  for (int i = 0; i < THIN_WORDS; ++i) words[i] = _mm256_castps_si256(pairs[i]);
}

INLINE vf thin_scales(const int32_t format, const char* const* scales, int64_t block) {
  const int32_t bytes = format == SLUICE_PACKED_MXFP4 ? 1 : format == SLUICE_PACKED_FP8 ? 4 : 2;
  _Alignas(32) float lanes[LANES];
  for (int r = 0; r < LANES; ++r) lanes[r] = scale_at(format, scales[r] + block * bytes);
  return _mm256_load_ps(lanes);
}

/* C's eight columns of each row; those past `cols` are neither read nor written. */
INLINE vf thin_from(int32_t dtype, const char* at, int64_t cols) { return load_first(dtype, at, cols); }

static void thin_to(int32_t dtype, char* at, int64_t cols, vf sum) {
  if (cols >= LANES) {
    store(dtype, at, 1, sum);
    return;
  }
  char out[LANES * 4];
  store(dtype, out, 1, sum);
  memcpy(at, out, (size_t)cols * (dtype == SLUICE_DTYPE_F32 ? 4 : 2));
}

typedef struct thin_sums_s {
  vf of[THIN_MOST_ROWS][THIN_MOST_GROUPS];
} thin_sums_t;

/* The codes of one chunk, `left` of them where it is the last and not whole. */
INLINE void thin_chunk(const int32_t format, const int rows, const int is_f32, const int is_whole, const thin_tile_t* t,
                       codes_t words[THIN_MOST_GROUPS][THIN_WORDS], const vf* scale, const float* x, int64_t left,
                       thin_sums_t* sums) {
  const int bits = bits_of(format), groups = thin_groups(rows), codes_in_word = 32 / bits;
#pragma GCC unroll 1
  for (int w = 0; w < THIN_WORDS; ++w, x += codes_in_word, left -= codes_in_word) {
    codes_t word[THIN_MOST_GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) word[g] = words[g][w];
#pragma GCC unroll 8
    for (int step = 0; step < codes_in_word; ++step) {
      if (!is_whole && step >= left) return;
#pragma GCC unroll 4
      for (int g = 0; g < groups; ++g) {
        const vf b = thin_values(format, is_f32, t->dtype_ab, word[g], scale[g]);
        word[g] = _mm256_srli_epi32(word[g], bits);
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) sums->of[i][g] = vf_fma(vf_set1(x[i * t->a_ld + step]), b, sums->of[i][g]);
      }
    }
  }
}

INLINE void thin_tile_of(const int32_t format, const int rows, const int is_f32, const thin_tile_t* t) {
  const sluice_gemm_form_t* f = t->f;
  const int bits = bits_of(format), groups = thin_groups(rows);
  const int64_t row_bytes = f->ldb * bits / 8, bytes_c = t->dtype_c == SLUICE_DTYPE_F32 ? 4 : 2;
  const int64_t all_bytes = (f->k * bits + 7) / 8, block_bytes = f->packed.block_cols * bits / 8;
  const int64_t ahead = groups * LANES * row_bytes; /* the tile after this one */
  const uint8_t* codes[THIN_MOST_GROUPS * LANES];
  const char* scales[THIN_MOST_GROUPS * LANES];
  for (int r = 0; r < groups * LANES; ++r) {
    const int64_t row = t->j0 + (r < t->cols ? r : 0); /* what is computed of others is not stored */
    codes[r] = (const uint8_t*)f->b + row * row_bytes;
    scales[r] = sluice_packed_scales(&f->packed, row);
  }
  thin_sums_t sums;
  vf scale[THIN_MOST_GROUPS];
  char* c = (char*)f->c + t->j0 * bytes_c;
#pragma GCC unroll 4
  for (int g = 0; g < groups; ++g) {
    scale[g] = vf_zero();
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
      const char* at = c + (i * f->ldc + g * LANES) * bytes_c;
      sums.of[i][g] = t->starts ? thin_from(t->dtype_c, at, t->cols - g * LANES) : vf_zero();
    }
  }
  int64_t until = 0; /* the end of the block whose scales these are */
  for (int64_t at = 0; at < all_bytes; at += THIN_CHUNK) {
    codes_t words[THIN_MOST_GROUPS][THIN_WORDS];
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) thin_words(codes + g * LANES, at, all_bytes - at, words[g]);
    if (at >= until) { /* a block is a whole number of chunks */
#pragma GCC unroll 4
      for (int g = 0; g < groups; ++g) scale[g] = thin_scales(format, scales + g * LANES, at / block_bytes);
      until = (at / block_bytes + 1) * block_bytes;
    }
    if (at % 64 == 0) {
      for (int r = 0; r < groups * LANES; ++r) __builtin_prefetch(codes[r] + ahead + at, 0, 2);
    }
    const float* x = t->a + at * 8 / bits;
    const int64_t left = f->k - at * 8 / bits;
    if (left >= THIN_CHUNK * 8 / bits) {
      thin_chunk(format, rows, is_f32, 1, t, words, scale, x, left, &sums);
    } else {
      thin_chunk(format, rows, is_f32, 0, t, words, scale, x, left, &sums);
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < groups; ++g) {
    if (t->cols <= g * LANES) break;
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
      thin_to(t->dtype_c, c + (i * f->ldc + g * LANES) * bytes_c, t->cols - g * LANES, sums.of[i][g]);
    }
  }
}

#define THIN(name, format, rows)                                                                           \
  static void name##_f32(const thin_tile_t* tile) { thin_tile_of(SLUICE_PACKED_##format, rows, 1, tile); } \
  static void name##_narrow(const thin_tile_t* tile) { thin_tile_of(SLUICE_PACKED_##format, rows, 0, tile); }
#define THIN_OF(format)              \
  THIN(thin_##format##_1, format, 1) \
  THIN(thin_##format##_2, format, 2) THIN(thin_##format##_3, format, 3) THIN(thin_##format##_4, format, 4)
THIN_OF(MXFP4)
THIN_OF(FP8)
THIN_OF(INT8)
THIN_OF(INT4)

static int thin_takes(const sluice_gemm_form_t* f, int32_t dtype_c) {
  (void)dtype_c;
  return f->packed.format != SLUICE_PACKED_NO && f->m <= THIN_MOST_ROWS && !f->trans_a && f->trans_b &&
         f->k * THIN_MOST_ROWS * (int64_t)sizeof(float) <= THIN_MOST_BYTES;
}

static int64_t thin_ld(const sluice_gemm_form_t* f) { return (f->k + LANES - 1) / LANES * LANES; }

static int64_t thin_room(const sluice_gemm_form_t* f) { return (f->m * thin_ld(f) + 15) / 16 * 16; }

static void thin_gemm(const sluice_gemm_form_t* f, int32_t dtype, int32_t dtype_c, float beta, int64_t from, int64_t to,
                      float* room, const sluice_gemm_form_t* next, int64_t next_from) {
#define THIN_TILES(format)                                                                                   \
  {                                                                                                          \
    {thin_##format##_1_f32, thin_##format##_2_f32, thin_##format##_3_f32, thin_##format##_4_f32}, {          \
      thin_##format##_1_narrow, thin_##format##_2_narrow, thin_##format##_3_narrow, thin_##format##_4_narrow \
    }                                                                                                        \
  }
  static void (*const tiles[SLUICE_PACKED_FORMATS][2][THIN_MOST_ROWS])(const thin_tile_t*) = {
      [SLUICE_PACKED_MXFP4] = THIN_TILES(MXFP4),
      [SLUICE_PACKED_FP8] = THIN_TILES(FP8),
      [SLUICE_PACKED_INT8] = THIN_TILES(INT8),
      [SLUICE_PACKED_INT4] = THIN_TILES(INT4),
  };
  (void)next, (void)next_from;
  const int64_t bytes = dtype == SLUICE_DTYPE_F32 ? 4 : 2, ld = thin_ld(f);
  for (int64_t i = 0; i < f->m; ++i) {
    for (int64_t k = 0; k < f->k; k += LANES) {
      _mm256_storeu_ps(room + i * ld + k, load_first(dtype, (const char*)f->a + (i * f->lda + k) * bytes, f->k - k));
    }
  }
  thin_tile_t t = {.f = f, .a = room, .a_ld = ld, .dtype_ab = dtype, .dtype_c = dtype_c, .starts = beta != 0.0f};
  const int64_t step = thin_groups((int)f->m) * LANES;
  for (t.j0 = from; t.j0 < to; t.j0 += step) {
    t.cols = to - t.j0 < step ? to - t.j0 : step;
    tiles[f->packed.format][dtype != SLUICE_DTYPE_F32][f->m - 1](&t);
  }
}

static const sluice_native_thin_t thin = {.takes = thin_takes, .room = thin_room, .problem = thin_gemm};
