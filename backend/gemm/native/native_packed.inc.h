// SPDX-License-Identifier: Apache-2.0
/* GEMMs in f32 with packed weights: those of few rows decode B in registers, all others use panels of B. native_avx2.c
 * and native_avx512.c include this file with the definitions for native_decode.inc.h and
 *
 *   pack_rows_of, pack_columns_of(dtype, ...)   pack_rows, pack_columns of native_kernels.h for a constant dtype
 *   transposed_words(at, from, left, words)     words[i]: dword i of the next 64 bytes of LANES rows; bytes past
 *                                    `left` are not read
 *   word_values(format, word)        the code in the lowest bits of each lane as f32, without its scale
 *   word_shifted(word, bits)         each lane shifted right
 *   e8m0_of(word), upper_of(word)    the MXFP4 scale in the lowest byte, the bf16 in the lower half, as f32
 *   vf_of_bits(word)                 f32 with these bits
 *   vf_storeu(at, x)                 a register of f32 that need not be aligned
 *   load_first, store_first(dtype, at, count, x)     the first `count` elements, which may be all or none
 *   FEW_ROWS(X)                      X(rows, forward, gradient) ...: the numbers of rows of A that a tile can have, and
 *                                    its registers of columns in forwards and in gradients of the input
 *   few_rows(m)                      the smallest of these numbers of rows that is at least m, or 0
 *
 * If k is contiguous in B (forwards), decoding its rows and transposing the values would cost more than multiplying a
 * few rows by them. So the codes are transposed before they are decoded, four or eight in a dword: a register then
 * holds the codes of LANES rows of B for the same k, one row and its scale per lane. If B is stored row by row
 * (gradients of the input), a register holds the codes of neighbouring columns. Each decoded register is multiplied by
 * broadcast elements of A. The sum of an element is the same chain of fused multiply-adds over k as in a tile, and
 * values are rounded as in sluice_packed_decode, so the bits are the same. */

static void pack_rows(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                      int64_t out_ld) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: pack_rows_of(SLUICE_DTYPE_BF16, in, in_ld, count, depth, out, out_ld); break;
    case SLUICE_DTYPE_F16: pack_rows_of(SLUICE_DTYPE_F16, in, in_ld, count, depth, out, out_ld); break;
    default: pack_rows_of(SLUICE_DTYPE_F32, in, in_ld, count, depth, out, out_ld); break;
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

enum {
  CHUNK = 64, /* bytes of a row of B that are read at a time: a cache line */
  WORDS = CHUNK / 4,
  PART = 16, /* bytes of codes with the same scale: blocks have 32 columns or a multiple of them */
  PART_WORDS = PART / 4,
  MOST_ROWS = 8,
  MOST_GROUPS = 8,
  MOST_SUMS = 16,        /* registers */
  FEW_BYTES = 512 << 10, /* of A in f32 */
  ROWS_AHEAD = 24        /* of B: the distance of prefetches if B is stored row by row */
};

INLINE int32_t scale_bytes_of(const int32_t format) {
  return format == SLUICE_PACKED_MXFP4 ? 1 : format == SLUICE_PACKED_FP8 ? 4 : 2;
}

/* Rounds to the dtype of the GEMM's operands. */
INLINE vf in_dtype(const int is_f32, int32_t dtype, vf x) {
  if (is_f32) return x;
  return dtype == SLUICE_DTYPE_BF16 ? rounded(SLUICE_DTYPE_BF16, x) : rounded(SLUICE_DTYPE_F16, x);
}

/* ---- k contiguous in B ------------------------------------------------------------------------------------------ */

/* LANES rows of B, one for each lane, and their scales for some consecutive blocks. */
typedef struct code_rows_s {
  const uint8_t* codes[LANES];
  const uint8_t* scales[LANES];
  codes_t window[WORDS];
  int64_t window_at; /* bytes of scales before those in `window` */
} code_rows_t;

/* A chunk of each of these rows: the codes, and the scales of each part. */
typedef struct chunk_s {
  codes_t words[WORDS];
  vf scale[CHUNK / PART];
} chunk_t;

/* The functions marked noinline do much work per call and have many callers. */

static void __attribute__((noinline))
transpose_words(const uint8_t* const* at, int64_t from, int64_t left, codes_t* words) {
  transposed_words(at, from, left, words);
}

/* Begins with rows [row, row + count). Results of the lanes after `count` are not used. */
static void __attribute__((noinline))
begin_rows(const sluice_gemm_form_t* f, int64_t row, int64_t count, code_rows_t* out) {
  for (int64_t r = 0; r < LANES; ++r) {
    const int64_t each = row + (r < count ? r : 0);
    out->codes[r] = (const uint8_t*)f->b + sluice_packed_bytes(bits_of(f->packed.format), f->ldb, each, 0);
    out->scales[r] = (const uint8_t*)sluice_packed_scales(&f->packed, each);
  }
  out->window_at = -CHUNK;
}

/* Returns the scales of a block. Calls must be in ascending order of blocks. */
static vf scales_of(const sluice_gemm_form_t* f, int64_t block, code_rows_t* rows) {
  const int32_t format = f->packed.format;
  const int64_t bytes = scale_bytes_of(format), at = block * bytes;
  if (at >= rows->window_at + CHUNK) {
    transpose_words(rows->scales, at, sluice_packed_blocks(f->k, f->packed.block_cols) * bytes - at, rows->window);
    rows->window_at = at;
  }
  const int64_t place = at - rows->window_at;
  const codes_t word = word_shifted(rows->window[place / 4], (int)(place % 4) * 8);
  if (format == SLUICE_PACKED_MXFP4) return e8m0_of(word);
  return format == SLUICE_PACKED_FP8 ? vf_of_bits(word) : upper_of(word);
}

/* Reads bytes [from, end) of the rows, at most a chunk. */
static void __attribute__((noinline))
begin_chunk(const sluice_gemm_form_t* f, int64_t from, int64_t end, code_rows_t* rows, chunk_t* out) {
  const int64_t block_bytes = f->packed.block_cols * bits_of(f->packed.format) / 8;
  transpose_words(rows->codes, from, end - from, out->words);
  int64_t until = from; /* the end of the block of the last scales */
  for (int part = 0; part < CHUNK / PART && from + part * PART < end; ++part) {
    const int64_t at = from + part * PART;
    if (part > 0) out->scale[part] = out->scale[part - 1];
    if (at < until) continue;
    out->scale[part] = scales_of(f, at / block_bytes, rows);
    until = (at / block_bytes + 1) * block_bytes;
  }
}

INLINE vf scaled_values(const int32_t format, const int is_f32, int32_t dtype, codes_t word, vf scale) {
  return in_dtype(is_f32, dtype, vf_mul(word_values(format, word), scale));
}

typedef struct packed_tile_s {
  const sluice_gemm_form_t* f;
  const float* a; /* [k][rows] */
  int64_t rows, j0, cols;
  int32_t dtype_ab, dtype_c;
  int starts; /* 1: sums start from C; 0: from zeros */
} packed_tile_t;

typedef struct packed_sums_s {
  vf of[MOST_ROWS][MOST_GROUPS];
} packed_sums_t;

/* Writes the tile's part of C, or zeros, to `out` in the order of the registers. */
static void __attribute__((noinline)) read_tile(const packed_tile_t* t, int rows, int groups, float* out) {
  const int64_t bytes = t->dtype_c == SLUICE_DTYPE_F32 ? 4 : 2;
  const char* c = (const char*)t->f->c + t->j0 * bytes;
  for (int i = 0; i < rows; ++i, c += t->f->ldc * bytes) {
    for (int g = 0; g < groups; ++g, out += LANES) {
      const int64_t count = t->starts && i < t->rows ? t->cols - g * LANES : 0;
      vf_store(out, count > 0 ? load_first(t->dtype_c, c + g * LANES * bytes, count) : vf_zero());
    }
  }
}

static void __attribute__((noinline)) write_tile(const packed_tile_t* t, int groups, const float* sums) {
  const int64_t bytes = t->dtype_c == SLUICE_DTYPE_F32 ? 4 : 2;
  char* c = (char*)t->f->c + t->j0 * bytes;
  for (int64_t i = 0; i < t->rows; ++i, c += t->f->ldc * bytes, sums += groups * LANES) {
    for (int g = 0; g < groups && g * LANES < t->cols; ++g) {
      store_first(t->dtype_c, c + g * LANES * bytes, t->cols - g * LANES, vf_load(sums + g * LANES));
    }
  }
}

INLINE void begin_sums(const int rows, const int groups, const packed_tile_t* t, packed_sums_t* sums) {
  _Alignas(64) float start[MOST_SUMS * LANES];
  read_tile(t, rows, groups, start);
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < groups; ++g) sums->of[i][g] = vf_load(start + (i * groups + g) * LANES);
  }
}

INLINE void end_sums(const int rows, const int groups, const packed_tile_t* t, const packed_sums_t* sums) {
  _Alignas(64) float end[MOST_SUMS * LANES];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int g = 0; g < groups; ++g) vf_store(end + (i * groups + g) * LANES, sums->of[i][g]);
  }
  write_tile(t, groups, end);
}

/* Multiplies by `left` codes of the chunks of `groups` groups of rows. Not unrolled, since there are many copies. */
INLINE void multiply_chunk(const int32_t format, const int rows, const int groups, const int is_f32, int32_t dtype,
                           const chunk_t* chunks, const float* x, int64_t left, packed_sums_t* sums) {
  const int bits = bits_of(format), codes_in_word = 32 / bits;
  for (int w = 0; w < WORDS && left > 0; ++w, left -= codes_in_word) {
    codes_t word[MOST_GROUPS];
    vf scale[MOST_GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < groups; ++g) {
      word[g] = chunks[g].words[w];
      scale[g] = chunks[g].scale[w / PART_WORDS];
    }
    const float* const end = x + (left < codes_in_word ? left : codes_in_word) * rows;
    do {
#pragma GCC unroll 4
      for (int g = 0; g < groups; ++g) {
        const vf b = scaled_values(format, is_f32, dtype, word[g], scale[g]);
        word[g] = word_shifted(word[g], bits);
#pragma GCC unroll 8
        for (int i = 0; i < rows; ++i) sums->of[i][g] = vf_fma(vf_set1(x[i]), b, sums->of[i][g]);
      }
      x += rows;
    } while (x < end);
  }
}

INLINE void forward_tile(const int32_t format, const int rows, const int groups, const int is_f32,
                         const packed_tile_t* t) {
  const sluice_gemm_form_t* f = t->f;
  const int bits = bits_of(format);
  const int64_t all_bytes = (f->k * bits + 7) / 8;
  const int64_t ahead = groups * LANES * f->ldb * bits / 8; /* the tile after this one */
  code_rows_t at_rows[MOST_GROUPS];
  chunk_t chunks[MOST_GROUPS];
  packed_sums_t sums;
  for (int g = 0; g < groups; ++g) {
    const int64_t first = g * LANES < t->cols ? g * LANES : 0;
    begin_rows(f, t->j0 + first, t->cols - first, &at_rows[g]);
  }
  begin_sums(rows, groups, t, &sums);
  for (int64_t from = 0; from < all_bytes; from += CHUNK) {
    const int64_t end = from + CHUNK < all_bytes ? from + CHUNK : all_bytes, k = from * 8 / bits;
    for (int g = 0; g < groups; ++g) {
      begin_chunk(f, from, end, &at_rows[g], &chunks[g]);
      for (int r = 0; r < LANES; ++r) __builtin_prefetch(at_rows[g].codes[r] + ahead + from, 0, 2);
    }
    multiply_chunk(format, rows, groups, is_f32, t->dtype_ab, chunks, t->a + k * rows, f->k - k, &sums);
  }
  end_sums(rows, groups, t, &sums);
}

/* ---- B row by row ------------------------------------------------------------------------------------------------ */

/* Rows [row, end) with scales that are `step` bytes apart: all rows of a weight, or the rows of one block of rows. */
typedef struct stretch_s {
  const char* scales;
  int64_t step, end;
} stretch_t;

INLINE stretch_t stretch_of(const int32_t format, const sluice_gemm_form_t* f, int64_t row) {
  const char* scales = sluice_packed_scales(&f->packed, row);
  if (format != SLUICE_PACKED_FP8) return (stretch_t){scales, f->packed.scales_ld * scale_bytes_of(format), f->k};
  const int64_t block_rows = sluice_packed_format(SLUICE_PACKED_FP8)->block_rows, half = f->packed.half;
  const int64_t first = half > 0 && row >= half ? half : 0;
  int64_t end = row + block_rows - (row - first) % block_rows;
  if (half > row && half < end) end = half;
  return (stretch_t){scales, 0, end < f->k ? end : f->k};
}

/* Keeps a tile of C in registers and reads B once, in the order of its rows. Two adjacent registers share a scale. */
INLINE void gradient_rows(const int32_t format, const int rows, const int groups, const int is_f32, const int is_whole,
                          const packed_tile_t* t, packed_sums_t* sums) {
  const sluice_gemm_form_t* f = t->f;
  const int32_t dtype = is_f32 ? SLUICE_DTYPE_F32 : t->dtype_ab;
  const int bits = bits_of(format);
  const int64_t row_bytes = f->ldb * bits / 8;
  const uint8_t* codes = (const uint8_t*)f->b + t->j0 * bits / 8;
  int64_t block[MOST_GROUPS / 2];
#pragma GCC unroll 4
  for (int g = 0; g < groups / 2; ++g) block[g] = (t->j0 + g * 2 * LANES) / f->packed.block_cols;
  const float* x = t->a;
  for (int64_t k = 0; k < f->k;) {
    const stretch_t stretch = stretch_of(format, f, k);
    for (const char* scales = stretch.scales; k < stretch.end; ++k, scales += stretch.step) {
#pragma GCC unroll 2
      for (int line = 0; line < groups * LANES * bits / 8; line += CHUNK) {
        __builtin_prefetch(codes + ROWS_AHEAD * row_bytes + line, 0, 3);
      }
#pragma GCC unroll 8
      for (int g = 0; g < groups; g += 2) {
        if (!is_whole && g * LANES >= t->cols) break;
        const scaled_t scaled = block_of(format, dtype, scales, block[g / 2]);
#pragma GCC unroll 2
        for (int each = g; each < g + 2; ++each) {
          const int64_t left = is_whole ? LANES : t->cols - each * LANES;
          if (!is_whole && left <= 0) break;
          const vf b = decode_lanes(format, dtype, codes + each * LANES * bits / 8, left, scaled);
#pragma GCC unroll 8
          for (int i = 0; i < rows; ++i) sums->of[i][each] = vf_fma(vf_set1(x[i]), b, sums->of[i][each]);
        }
      }
      codes += row_bytes;
      x += rows;
    }
  }
}

INLINE void gradient_tile(const int32_t format, const int rows, const int groups, const int is_f32,
                          const packed_tile_t* tile) {
  packed_sums_t sums;
  packed_tile_t t = *tile;
  if (t.cols >= groups * LANES) {
    begin_sums(rows, groups, &t, &sums);
    gradient_rows(format, rows, groups, is_f32, 1, &t, &sums);
    end_sums(rows, groups, &t, &sums);
    return;
  }
  for (; t.cols > 0; t.j0 += 2 * LANES, t.cols -= 2 * LANES) {
    begin_sums(rows, 2, &t, &sums);
    gradient_rows(format, rows, 2, is_f32, 0, &t, &sums);
    end_sums(rows, 2, &t, &sums);
  }
}

/* ---- panels ------------------------------------------------------------------------------------------------------ */

/* Packs rows [row, row + count) of B, from k0 on, as LANES columns of a panel. */
INLINE void pack_lanes(const int32_t format, const int is_f32, int32_t dtype, const sluice_gemm_form_t* f, int64_t row,
                       int64_t count, int64_t k0, int64_t depth, float* out, int64_t out_ld) {
  const int bits = bits_of(format), codes_in_word = 32 / bits;
  const int64_t end = ((k0 + depth) * bits + 7) / 8;
  code_rows_t rows;
  chunk_t chunk;
  begin_rows(f, row, count, &rows);
  for (int64_t from = k0 * bits / 8; from < end; from += CHUNK) {
    begin_chunk(f, from, from + CHUNK < end ? from + CHUNK : end, &rows, &chunk);
    for (int w = 0; w < WORDS && depth > 0; ++w, depth -= codes_in_word) {
      codes_t word = chunk.words[w];
      const vf scale = chunk.scale[w / PART_WORDS];
      for (int64_t left = depth < codes_in_word ? depth : codes_in_word; left > 0; --left) {
        vf_storeu(out, scaled_values(format, is_f32, dtype, word, scale));
        word = word_shifted(word, bits);
        out += out_ld;
      }
    }
  }
}

INLINE void pack_codes_along_as(const int32_t format, const int is_f32, int32_t dtype, const sluice_gemm_form_t* f,
                                int64_t row, int64_t count, int64_t k0, int64_t depth, float* out, int64_t out_ld) {
  for (int64_t lane = 0; lane < count; lane += LANES) {
    pack_lanes(format, is_f32, dtype, f, row + lane, count - lane, k0, depth, out + lane, out_ld);
  }
}

/* Decodes columns [j0, j0 + cols) of row `k` of B into one row of each panel. j0 is the first column of a panel. */
INLINE void pack_row(const int32_t format, const int is_f32, int32_t narrow, const sluice_gemm_form_t* f,
                     const char* scales, int64_t k, int64_t j0, int64_t block, int64_t cols, float* out,
                     int64_t panel) {
  const int32_t dtype = is_f32 ? SLUICE_DTYPE_F32 : narrow;
  const int bits = bits_of(format);
  const uint8_t* codes = (const uint8_t*)f->b + sluice_packed_bytes(bits, f->ldb, k, j0);
  int64_t end = (block + 1) * f->packed.block_cols - j0;
  scaled_t scaled = block_of(format, dtype, scales, block);
  for (int64_t j = 0; j < cols; j += WIDTH, out += panel, codes += WIDTH * bits / 8) {
    if (j >= end) {
      scaled = block_of(format, dtype, scales, ++block);
      end += f->packed.block_cols;
    }
    if (cols - j >= WIDTH) {
      vf_store(out, decode_lanes(format, dtype, codes, LANES, scaled));
      vf_store(out + LANES, decode_lanes(format, dtype, codes + LANES * bits / 8, LANES, scaled));
      continue;
    }
    const int64_t left = cols - j;
    vf_store(out, decode_lanes(format, dtype, codes, left, scaled));
    vf_store(out + LANES,
             left <= LANES ? vf_zero() : decode_lanes(format, dtype, codes + LANES * bits / 8, left - LANES, scaled));
  }
}

INLINE void pack_codes_across_as(const int32_t format, const int is_f32, int32_t dtype, const sluice_gemm_form_t* f,
                                 int64_t k0, int64_t depth, int64_t j0, int64_t cols, float* out) {
  const int64_t block = j0 / f->packed.block_cols;
  for (int64_t k = 0; k < depth;) {
    const stretch_t stretch = stretch_of(format, f, k0 + k);
    for (const char* scales = stretch.scales; k < depth && k0 + k < stretch.end; ++k, scales += stretch.step) {
      pack_row(format, is_f32, dtype, f, scales, k0 + k, j0, block, cols, out + k * WIDTH, depth * WIDTH);
    }
  }
}

#define PACK_AS(way, format, ...)                       \
  if (dtype == SLUICE_DTYPE_F32) {                      \
    way(SLUICE_PACKED_##format, 1, dtype, __VA_ARGS__); \
  } else {                                              \
    way(SLUICE_PACKED_##format, 0, dtype, __VA_ARGS__); \
  }
#define PACK_FORMAT(way, ...)                                         \
  switch (f->packed.format) {                                         \
    case SLUICE_PACKED_MXFP4: PACK_AS(way, MXFP4, __VA_ARGS__) break; \
    case SLUICE_PACKED_FP8: PACK_AS(way, FP8, __VA_ARGS__) break;     \
    case SLUICE_PACKED_INT8: PACK_AS(way, INT8, __VA_ARGS__) break;   \
    default: PACK_AS(way, INT4, __VA_ARGS__) break;                   \
  }

static void pack_codes_along(const sluice_gemm_form_t* f, int32_t dtype, int64_t row, int64_t count, int64_t k0,
                             int64_t depth, float* out, int64_t out_ld) {
  PACK_FORMAT(pack_codes_along_as, f, row, count, k0, depth, out, out_ld)
}

static void pack_codes_across(const sluice_gemm_form_t* f, int32_t dtype, int64_t k0, int64_t depth, int64_t j0,
                              int64_t cols, float* out) {
  PACK_FORMAT(pack_codes_across_as, f, k0, depth, j0, cols, out)
}

/* ---- GEMMs of few rows ------------------------------------------------------------------------------------------- */

typedef struct packed_tiles_s {
  int rows, forward_groups, gradient_groups;
  void (*forward[SLUICE_PACKED_FORMATS][2])(const packed_tile_t*);
  void (*gradient[SLUICE_PACKED_FORMATS][2])(const packed_tile_t*);
} packed_tiles_t;

#define PACKED_TILES(format, rows, forward, gradient)                          \
  static void forward_##format##_##rows##_f32(const packed_tile_t* tile) {     \
    forward_tile(SLUICE_PACKED_##format, rows, forward, 1, tile);              \
  }                                                                            \
  static void forward_##format##_##rows##_narrow(const packed_tile_t* tile) {  \
    forward_tile(SLUICE_PACKED_##format, rows, forward, 0, tile);              \
  }                                                                            \
  static void gradient_##format##_##rows##_f32(const packed_tile_t* tile) {    \
    gradient_tile(SLUICE_PACKED_##format, rows, gradient, 1, tile);            \
  }                                                                            \
  static void gradient_##format##_##rows##_narrow(const packed_tile_t* tile) { \
    gradient_tile(SLUICE_PACKED_##format, rows, gradient, 0, tile);            \
  }
#define PACKED_TILES_OF(rows, forward, gradient) \
  PACKED_TILES(MXFP4, rows, forward, gradient)   \
  PACKED_TILES(FP8, rows, forward, gradient)     \
  PACKED_TILES(INT8, rows, forward, gradient)    \
  PACKED_TILES(INT4, rows, forward, gradient)
FEW_ROWS(PACKED_TILES_OF)

#define PACKED_PAIR(way, format, rows) \
  { way##_##format##_##rows##_f32, way##_##format##_##rows##_narrow }
#define PACKED_FORMATS(way, rows)                                                                           \
  {                                                                                                         \
    {NULL, NULL}, PACKED_PAIR(way, MXFP4, rows), PACKED_PAIR(way, FP8, rows), PACKED_PAIR(way, INT8, rows), \
        PACKED_PAIR(way, INT4, rows)                                                                        \
  }
#define PACKED_ENTRY(rows, forward_groups, gradient_groups) \
  {rows, forward_groups, gradient_groups, PACKED_FORMATS(forward, rows), PACKED_FORMATS(gradient, rows)},
static const packed_tiles_t packed_tiles[] = {FEW_ROWS(PACKED_ENTRY)};
_Static_assert(SLUICE_PACKED_MXFP4 == 1 && SLUICE_PACKED_FP8 == 2 && SLUICE_PACKED_INT8 == 3 && SLUICE_PACKED_INT4 == 4,
               "formats are listed in their order");

static int packed_takes(const sluice_gemm_form_t* f) {
  return f->packed.format != SLUICE_PACKED_NO && !f->trans_a && few_rows(f->m) > 0 &&
         f->k * MOST_ROWS * (int64_t)sizeof(float) <= FEW_BYTES;
}

/* Includes the whole registers that packing A writes past its end. */
static int64_t packed_room(const sluice_gemm_form_t* f) { return (f->k * few_rows(f->m) + 2 * 16 - 1) / 16 * 16; }

static void packed_gemm(const sluice_gemm_form_t* f, int32_t dtype, int32_t dtype_c, float beta, int64_t from,
                        int64_t to, float* room) {
  const int rows = few_rows(f->m);
  const packed_tiles_t* tiles = packed_tiles;
  while (tiles->rows != rows) ++tiles;
  const int is_narrow = dtype != SLUICE_DTYPE_F32;
  void (*const tile)(const packed_tile_t*) =
      f->trans_b ? tiles->forward[f->packed.format][is_narrow] : tiles->gradient[f->packed.format][is_narrow];
  const int64_t step = (f->trans_b ? tiles->forward_groups : tiles->gradient_groups) * LANES;
  packed_tile_t t = {.f = f, .a = room, .rows = f->m, .dtype_ab = dtype, .dtype_c = dtype_c, .starts = beta != 0.0f};
  pack_rows(f->a, f->lda, dtype, f->m, f->k, room,
            rows); /* lanes m to `rows` are zero; the next step overwrites later ones */
  for (t.j0 = from; t.j0 < to; t.j0 += step) {
    t.cols = to - t.j0 < step ? to - t.j0 : step;
    tile(&t);
  }
}
