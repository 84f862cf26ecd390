// SPDX-License-Identifier: Apache-2.0
/* GEMMs of few rows with weights in which k is contiguous (forwards), for processors with AVX-512. native_avx512.c and
 * native_avx512_bf16.c include this file after their packing, with
 *
 *   UNIT                           k per packed float
 *   thin_load(dtype, at, left)     the next LANES * UNIT of k of a row, zeros past `left`
 *   thin_unpack(format, dtype, row, k, left)     the same of a packed row from column k on
 *   THIN_BF16_ALONE                1: bf16 is the only dtype
 *
 * Packing a weight so that its columns fill registers needs a transposition, which costs as much as multiplying eight
 * rows by it. Here rows fill the registers instead: the few rows of A are transposed once for the whole GEMM, 16 to a
 * register, and multiplied by broadcast elements of B. Some rows of B at a time are copied, 16 steps of k to a line,
 * since lines of rows that are whole pages apart compete for the same few sets of a first-level cache. The sum of an
 * element is the same chain of fused multiply-adds over k as in a tile. */

enum { MOST_VECTORS = 2, THIN_BYTES = 512 << 10, LINE_K = LANES * UNIT, LEAST_LINES = 4 };

/* Columns of C that one tile computes, which are rows of B. */
INLINE int64_t thin_height(int vectors) { return vectors == 1 ? 16 : 12; }

typedef struct thin_tile_s {
  const sluice_gemm_form_t* f;
  const float* x; /* [depth / UNIT][16 * vectors]: rows of A */
  int64_t k0, depth, j0, cols;
  int32_t dtype_c;
  int starts; /* 1: sums start from C; 0: from zeros */
  int32_t dtype_ab;
  const char* next;   /* the rows of B of the next tile, to prefetch */
  int64_t next_bytes; /* from one of these rows to the next */
} thin_tile_t;

/* Bits of an element of B. */
INLINE int64_t thin_bits(int32_t dtype, const sluice_gemm_form_t* f) {
  if (f->packed.format != SLUICE_PACKED_NO) return bits_of(f->packed.format);
  return dtype == SLUICE_DTYPE_F32 ? 32 : 16;
}

/* Copies 16 steps of `height` rows of B, one line per row. */
INLINE void thin_copy(int32_t dtype, const char* b, int64_t row_bytes, int height, int64_t cols, int64_t left,
                      float* out) {
  if (cols >= height) {
#pragma GCC unroll 16
    for (int r = 0; r < height; ++r) vf_store(out + r * LANES, thin_load(dtype, b + r * row_bytes, left));
    return;
  }
  for (int r = 0; r < height; ++r) { /* results of rows past `cols` are not stored */
    vf_store(out + r * LANES, thin_load(dtype, b + (r < cols ? r : 0) * row_bytes, left));
  }
}

/* The same for packed rows. Those past `cols` repeat another row. */
INLINE void thin_copy_packed_as(const int32_t format, int32_t dtype, const packed_row_t* rows, int height, int64_t k,
                                int64_t left, float* out) {
  for (int r = 0; r < height; ++r) vf_store(out + r * LANES, thin_unpack(format, dtype, &rows[r], k, left));
}

INLINE void thin_copy_packed(int32_t format, int32_t dtype, const packed_row_t* rows, int height, int64_t k,
                             int64_t left, float* out) {
  switch (format) {
    case SLUICE_PACKED_MXFP4: thin_copy_packed_as(SLUICE_PACKED_MXFP4, dtype, rows, height, k, left, out); break;
    case SLUICE_PACKED_FP8: thin_copy_packed_as(SLUICE_PACKED_FP8, dtype, rows, height, k, left, out); break;
    case SLUICE_PACKED_INT8: thin_copy_packed_as(SLUICE_PACKED_INT8, dtype, rows, height, k, left, out); break;
    default: thin_copy_packed_as(SLUICE_PACKED_INT4, dtype, rows, height, k, left, out); break;
  }
}

/* One step: multiplies one element of each row of B, which are LANES apart in `line`, by all rows of A. */
INLINE void thin_step(const int vectors, const int height, const float* x, const float* line,
                      vf sum[MOST_VECTORS][LANES]) {
  vf rows[MOST_VECTORS];
#pragma GCC unroll 2
  for (int v = 0; v < vectors; ++v) rows[v] = vf_load(x + LANES * v);
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r) {
    const vf w = vf_set1(line[r * LANES]);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) sum[v][r] = vf_fma(rows[v], w, sum[v][r]);
  }
}

/* dtype 0: a packed weight, for any dtype of the GEMM. */
INLINE void thin_tile_of(const int vectors, const int height, const int32_t dtype, const thin_tile_t* t) {
  const sluice_gemm_form_t* f = t->f;
  const int64_t line_bytes = LINE_K * thin_bits(dtype, f) / 8;
  const int64_t row_bytes = f->ldb * thin_bits(dtype, f) / 8;
  const int64_t bytes_c = t->dtype_c == SLUICE_DTYPE_F32 ? 4 : 2;
  const lanes_t cols = first_lanes(t->cols < height ? t->cols : height);
  char* c = (char*)f->c + t->j0 * bytes_c;
  const char* b = (const char*)f->b + t->j0 * row_bytes + t->k0 * thin_bits(dtype, f) / 8;
  packed_row_t rows[LANES];
  for (int r = 0; dtype == 0 && r < height; ++r) {
    const int64_t row = t->j0 + (r < t->cols ? r : 0);
    rows[r] = packed_row(&f->packed, f->b, f->ldb, row);
  }
  _Alignas(64) float lines[2][LANES * LANES];
  vf sum[MOST_VECTORS][LANES];
#pragma GCC unroll 2
  for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) sum[v][r] = vf_zero();
    if (!t->starts) continue;
    for (int i = 0; i < LANES && v * LANES + i < f->m; ++i) {
      sum[v][i] = load(t->dtype_c, c + (v * LANES + i) * f->ldc * bytes_c, cols);
    }
    transpose(sum[v]);
  }
  const float* at = t->x;
  const int64_t next_bytes = t->next_bytes;
  const char* next_line = t->next;
  if (dtype == 0) {
    thin_copy_packed(f->packed.format, t->dtype_ab, rows, height, t->k0, t->depth, lines[0]);
  } else {
    thin_copy(dtype, b, row_bytes, height, t->cols, t->depth, lines[0]);
  }
  int turn = 0;
  for (int64_t k = t->depth; k > 0; k -= LINE_K, turn ^= 1) {
    const float* line = lines[turn];
    b += line_bytes;
    if (k > LINE_K && dtype == 0) {
      thin_copy_packed(f->packed.format, t->dtype_ab, rows, height, t->k0 + t->depth - k + LINE_K, k - LINE_K,
                       lines[turn ^ 1]);
    } else if (k > LINE_K) {
      thin_copy(dtype, b, row_bytes, height, t->cols, k - LINE_K, lines[turn ^ 1]);
    }
    if (k >= LINE_K) {
      const char* next = next_line;
#pragma GCC unroll 16
      for (int step = 0; step < LANES; ++step) {
        thin_step(vectors, height, at + step * LANES * vectors, line + step, sum);
        /* Prefetch one line of the next tile: many at once would delay the copies. */
        if (step >= height) continue;
        __builtin_prefetch(next, 0, 2);
        next += next_bytes;
      }
    } else {
      for (int64_t step = 0; step * UNIT < k; ++step)
        thin_step(vectors, height, at + step * LANES * vectors, line + step, sum);
    }
    at += (int64_t)LANES * LANES * vectors;
    next_line += line_bytes;
  }
#pragma GCC unroll 2
  for (int v = 0; v < vectors; ++v) {
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) {
      if (r >= height) sum[v][r] = vf_zero();
    }
    transpose(sum[v]);
    for (int i = 0; i < LANES && v * LANES + i < f->m; ++i) {
      store(t->dtype_c, c + (v * LANES + i) * f->ldc * bytes_c, cols, sum[v][i]);
    }
  }
}

#define THIN(name, vectors, dtype) \
  static void name(const thin_tile_t* tile) { thin_tile_of(vectors, (vectors) == 1 ? 16 : 12, dtype, tile); }
THIN(thin_1_bf16, 1, SLUICE_DTYPE_BF16)
THIN(thin_2_bf16, 2, SLUICE_DTYPE_BF16)
THIN(thin_1_packed, 1, 0)
THIN(thin_2_packed, 2, 0)
#if THIN_BF16_ALONE
#define THIN_TILES(vectors)                                                                      \
  {                                                                                              \
    thin_##vectors##_bf16, thin_##vectors##_bf16, thin_##vectors##_bf16, thin_##vectors##_packed \
  } /* no other dtype                                                                            \
     */
#else
#define THIN_TILES(vectors) \
  { thin_##vectors##_f32, thin_##vectors##_bf16, thin_##vectors##_f16, thin_##vectors##_packed }
THIN(thin_1_f32, 1, SLUICE_DTYPE_F32)
THIN(thin_2_f32, 2, SLUICE_DTYPE_F32)
THIN(thin_1_f16, 1, SLUICE_DTYPE_F16)
THIN(thin_2_f16, 2, SLUICE_DTYPE_F16)
#endif

static int thin_vectors(const sluice_gemm_form_t* f) { return f->m > LANES ? 2 : 1; }

static int64_t thin_depth(const sluice_gemm_form_t* f) {
  const int64_t most = THIN_BYTES / (int64_t)sizeof(float) / (LANES * thin_vectors(f)) * UNIT;
  return f->k < most ? f->k : most;
}

/* Takes the numbers of rows for which this is faster than tiles: with 17 to 24 rows too much of the second register is
 * empty, and with few k (the second product of an adapter) most of the time would go into stores of narrow columns. C
 * holds the sums between blocks of k, so its dtype must represent them exactly. */
static int thin_takes(const sluice_gemm_form_t* f, int32_t dtype_c) {
  const int is_few = f->m <= LANES || (f->m > LANES + LANES / 2 && f->m <= MOST_VECTORS * LANES);
  return is_few && f->k >= LEAST_LINES * LINE_K && !f->trans_a && f->trans_b &&
         (dtype_c == SLUICE_DTYPE_F32 || thin_depth(f) == f->k);
}

static int64_t thin_room(const sluice_gemm_form_t* f) {
  return (thin_depth(f) + UNIT - 1) / UNIT * LANES * thin_vectors(f);
}

static void thin_gemm(const sluice_gemm_form_t* f, int32_t dtype, int32_t dtype_c, float beta, int64_t from, int64_t to,
                      float* room, const sluice_gemm_form_t* next, int64_t next_from) {
  static void (*const tiles[2][4])(const thin_tile_t*) = {THIN_TILES(1), THIN_TILES(2)};
  const int64_t bytes = dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  const int vectors = thin_vectors(f);
  const int64_t height = thin_height(vectors);
  const int is_packed = f->packed.format != SLUICE_PACKED_NO;
  const int which = is_packed ? 3 : dtype == SLUICE_DTYPE_F32 ? 0 : dtype == SLUICE_DTYPE_BF16 ? 1 : 2;
  thin_tile_t t = {.f = f, .x = room, .dtype_c = dtype_c, .dtype_ab = dtype};
  for (t.k0 = 0; t.k0 < f->k; t.k0 += t.depth) {
    t.depth = thin_depth(f) < f->k - t.k0 ? thin_depth(f) : f->k - t.k0;
    t.starts = t.k0 > 0 || beta != 0.0f;
    for (int v = 0; v < vectors; ++v) {
      const int64_t count = f->m - v * LANES < LANES ? f->m - v * LANES : LANES;
      pack_rows((const char*)f->a + (v * LANES * f->lda + t.k0) * bytes, f->lda, dtype, count, t.depth,
                room + v * LANES, LANES * vectors);
    }
    for (t.j0 = from; t.j0 < to; t.j0 += height) {
      t.cols = to - t.j0;
      const sluice_gemm_form_t* after = f;
      int64_t k0 = t.k0;
      int64_t j0 = t.j0 + height;
      if (j0 >= to) {
        k0 += t.depth;
        j0 = from;
      }
      if (k0 >= f->k) {
        after = next != NULL ? next : f;
        k0 = 0;
        j0 = next_from;
      }
      const int64_t bits = thin_bits(dtype, after);
      t.next = (const char*)after->b + (j0 * after->ldb + k0) * bits / 8;
      t.next_bytes = after->ldb * bits / 8;
      tiles[vectors - 1][which](&t);
    }
  }
}
