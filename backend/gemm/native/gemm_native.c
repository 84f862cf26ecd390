// SPDX-License-Identifier: Apache-2.0
/* Sluice's own GEMMs: packs blocks of both operands as f32, or as pairs of bf16, and computes tiles of C from them.
 *
 *   for each block of rows (A packed: stays in a cache)
 *     for each block of depth
 *       for each block of columns (B packed)
 *         for each tile: C += A * B, while the next block of B is prefetched from memory
 *
 * Other libraries pack for thousands of rows. Here an expert has dozens of rows, so a weight is used only a few times
 * after it has been read from memory. It is packed one cache-sized block at a time, and the next block is prefetched
 * while the current one is multiplied. If B is stored row by row in f32 (input gradients), the first tile over a panel
 * reads B in place and packs it for the other tiles, so packing needs no pass of its own. The last block of a GEMM
 * prefetches the first block of the next GEMM. With very few rows, packing B would cost more than multiplying by it;
 * for such GEMMs a set may have other kernels (native_thin.inc.h, native_packed.inc.h). Threads share the panels of a
 * whole list (native_runs.h).
 *
 * A weight packed in 4 or 8 bits is decoded a few rows at a time when its panels are packed. The panels, and so the
 * bits of C, are those of the decoded weight.
 *
 * Numbers: an element of C is one chain of fused multiply-adds over k, ascending, that starts from zero (beta 0) or
 * from C (beta 1), in f32, and is rounded once to C's dtype. It does not depend on block sizes, number of rows,
 * position or threads, so a row has the same bits in every chunking. GEMMs of bf16 on a processor with AMX or
 * AVX512-BF16 have other rules, with the same consequence: native_amx.c, native_avx512_bf16.c.
 */
#include "backend/gemm/native/gemm_native.h"

#include <stdio.h>
#include <stdlib.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/gemm/gemm_form.h"
#include "backend/gemm/native/native_kernels.h"
#include "backend/gemm/native/native_runs.h"

/* Block sizes, found by measurement. B is read from memory in long runs: if k is contiguous, a page of each row at a
 * time; else some rows of many columns. With few rows of C, each panel of B is packed and then used at once; with many,
 * a wide block of B stays in the cache for all tiles of A. A weight gradient (A transposed) writes more than it reads,
 * so its blocks visit C rarely. (With non-temporal stores it reached 22 instead of 33 GFLOP/s, at 8 rows on one Cascade
 * Lake core.) In total a thread needs at most SLUICE_GEMM_THREAD_BYTES. */
typedef struct recipe_s {
  int64_t depth;            /* steps */
  int64_t a_bytes, b_bytes; /* of one block */
  int by_rows;              /* 1: the outer loop goes over tiles of rows of C; 0: over panels of B */
} recipe_t;
static const recipe_t along_few = {1024, 512 << 10, 128 << 10, 0};
static const recipe_t along_many = {512, 768 << 10, 256 << 10, 1};
static const recipe_t across_few = {128, 512 << 10, 128 << 10, 1};
static const recipe_t across_many = {256, 768 << 10, 256 << 10, 1};
static const recipe_t gradient = {512, 512 << 10, 128 << 10, 1};
enum { MANY_ROWS = 128 };
/* With at most this many k (adapters), a GEMM mostly writes C, so it writes the lines of a row in turn. */
enum { FEW_K = 128 };
/* With more rows, a GEMM does not wait for memory. */
enum { FEW_ROWS = 32 };
/* With more tiles over a panel, tiles that read B in place do not prefetch the next block; the others do. */
enum { FEW_TILES = 3 };
/* Bytes of f32 sums of a stripe; the sums of one block of C always fit. */
#define S_BYTES ((int64_t)512 << 10)
/* The least multiply-adds for which a thread is started: about 5 microseconds. */
#define THREAD_WORK ((double)(1 << 18))
/* The least multiply-adds of a piece: some 100 microseconds. */
#define PIECE_WORK ((double)(1 << 23))
/* The least columns of a piece if B is stored row by row, and of a weight gradient. */
enum { PIECE_RUN = 1024 };

enum { GROUP = 16, PAGE = 4096 };
/* Blocks of k begin at a multiple of this, at which blocks of a packed weight and pairs can begin too. */
enum { DEPTH_UNIT = SLUICE_PACKED_LEAST_COLS };

typedef struct sluice_gemm_native_s {
  sluice_gemm_t base;
  const sluice_native_kernels_t* kernels;
  sluice_threads_t pool;
} sluice_gemm_native_t;

/* ---- one GEMM ------------------------------------------------------------------------------------------------ */

/* The blocks of a GEMM. */
typedef struct blocks_s {
  int64_t rows, depth, cols; /* of a block; depth is a multiple of DEPTH_UNIT, cols of width */
  int64_t stripe;            /* columns that are computed over the whole of k before the next ones */
  int by_rows;
  int sums; /* 1: between blocks of depth, sums are kept in f32 outside of C */
  int raw;  /* 1: the first tiles of a block read B in place and pack it */
} blocks_t;

typedef struct work_s {
  const sluice_native_kernels_t* kernels;
  int32_t dtype_ab, dtype_c;
  float beta;
  float* a; /* the three parts of the workspace */
  float* b;
  float* sums;
} work_t;

/* Rows of a tile, which one call of the kernel computes. Blocks of rows are cut into tiles of nearly equal height. */
static int64_t tile_rows(const sluice_native_kernels_t* kernels, int64_t rows, int64_t tile) {
  int64_t count = sluice_ceil_div(rows, kernels->max_rows);
  return rows / count + (tile < rows % count);
}

static blocks_t cut(const sluice_native_kernels_t* kernels, const sluice_gemm_form_t* f, int32_t dtype_ab,
                    int32_t dtype_c) {
  blocks_t b;
  const recipe_t* recipe = f->m > MANY_ROWS ? &across_many : &across_few;
  if (f->trans_a) recipe = &gradient;
  if (f->trans_b) recipe = f->m > MANY_ROWS ? &along_many : &along_few;
  const int64_t each = (int64_t)sizeof(float);
  const int64_t unit = kernels->unit;
  b.depth = sluice_round_up(sluice_ceil_div(f->k, sluice_ceil_div(f->k, recipe->depth * unit)), DEPTH_UNIT);
  const int64_t steps = b.depth / unit;
  b.rows = sluice_ceil_div(f->m, sluice_ceil_div(f->m, recipe->a_bytes / each / steps));
  b.cols = sluice_max(recipe->b_bytes / each / steps / kernels->width, 1) * kernels->width;
  b.cols = sluice_min(b.cols, sluice_round_up(f->n, kernels->width));
  b.by_rows = recipe->by_rows || f->k <= FEW_K;
  b.raw = !f->trans_a && !f->trans_b && dtype_ab == SLUICE_DTYPE_F32 && f->packed.format == SLUICE_PACKED_NO;
  b.sums = dtype_c != SLUICE_DTYPE_F32 && b.depth < f->k;
  b.stripe = f->n;
  if (b.sums) b.stripe = sluice_max(S_BYTES / (int64_t)sizeof(float) / b.rows / b.cols, 1) * b.cols;
  return b;
}

static const char* element_of(const void* data, int64_t ld, int trans, int64_t row, int64_t col, int64_t bytes) {
  return (const char*)data + (trans ? col * ld + row : row * ld + col) * bytes;
}

static int64_t steps_of(const sluice_native_kernels_t* kernels, int64_t depth) {
  return kernels->unit == 1 ? depth : sluice_ceil_div(depth, kernels->unit);
}

/* Packs A [i0 ..][k0 ..] as tiles of [steps][rows of the tile]. */
static void pack_a(const work_t* w, const sluice_gemm_form_t* f, int64_t i0, int64_t rows, int64_t k0, int64_t depth) {
  const int64_t bytes = (int64_t)sluice_dtype_bytes(w->dtype_ab);
  float* out = w->a;
  for (int64_t i = 0, tile = 0; i < rows; ++tile) {
    int64_t count = tile_rows(w->kernels, rows, tile);
    const char* in = element_of(f->a, f->lda, f->trans_a, i0 + i, k0, bytes);
    if (f->trans_a) {
      w->kernels->pack_columns(in, f->lda, w->dtype_ab, count, depth, out, count);
    } else {
      w->kernels->pack_rows(in, f->lda, w->dtype_ab, count, depth, out, count);
    }
    out += count * steps_of(w->kernels, depth);
    i += count;
  }
}

/* Packs B [k0 ..][j0 ..] as panels of [steps][width]. */
static void pack_plain_b(const work_t* w, const sluice_gemm_form_t* f, int64_t k0, int64_t depth, int64_t j0,
                         int64_t cols) {
  const int64_t bytes = (int64_t)sluice_dtype_bytes(w->dtype_ab);
  const int64_t width = w->kernels->width;
  const int64_t steps = steps_of(w->kernels, depth);
  for (int64_t j = 0; j < sluice_round_up(cols, width); j += GROUP) {
    float* out = w->b + j / width * width * steps + j % width;
    int64_t count = sluice_min(sluice_max(cols - j, 0), GROUP);
    const char* in = element_of(f->b, f->ldb, f->trans_b, k0, j0 + sluice_min(j, cols - 1), bytes);
    if (f->trans_b) {
      w->kernels->pack_rows(in, f->ldb, w->dtype_ab, count, depth, out, width);
    } else {
      w->kernels->pack_columns(in, f->ldb, w->dtype_ab, count, depth, out, width);
    }
  }
}

enum { DECODED_BYTES = SLUICE_NATIVE_ROWS * SLUICE_NATIVE_COLS * sizeof(float) };

/* Decodes rows of a packed weight from (row, col) on, to rows SLUICE_NATIVE_COLS elements of dtype_ab apart. */
static void decode(const work_t* w, const sluice_gemm_form_t* f, int64_t row, int64_t rows, int64_t col, int64_t cols,
                   char* out) {
  const int64_t row_bytes = SLUICE_NATIVE_COLS * (int64_t)sluice_dtype_bytes(w->dtype_ab);
  for (int64_t r = 0; r < rows; ++r) {
    w->kernels->decode(&f->packed, f->b, f->ldb, row + r, col, cols, w->dtype_ab, out + r * row_bytes);
  }
}

/* pack_b for a B that is packed along k. */
static void pack_decoded_rows(const work_t* w, const sluice_gemm_form_t* f, int64_t k0, int64_t depth, int64_t j0,
                              int64_t cols) {
  _Alignas(64) char decoded[DECODED_BYTES];
  const int64_t width = w->kernels->width;
  const int64_t steps = steps_of(w->kernels, depth);
  for (int64_t j = 0; j < sluice_round_up(cols, width); j += GROUP) {
    float* out = w->b + j / width * width * steps + j % width;
    const int64_t count = sluice_min(sluice_max(cols - j, 0), GROUP);
    for (int64_t k = 0; k < depth; k += SLUICE_NATIVE_COLS) {
      const int64_t slice = sluice_min(depth - k, SLUICE_NATIVE_COLS);
      decode(w, f, j0 + j, count, k0 + k, slice, decoded);
      w->kernels->pack_rows(decoded, SLUICE_NATIVE_COLS, w->dtype_ab, count, slice, out + k / w->kernels->unit * width,
                            width);
    }
  }
}

/* pack_b for a B that is packed along its columns. */
static void pack_decoded_columns(const work_t* w, const sluice_gemm_form_t* f, int64_t k0, int64_t depth, int64_t j0,
                                 int64_t cols) {
  _Alignas(64) char decoded[DECODED_BYTES];
  const int64_t bytes = (int64_t)sluice_dtype_bytes(w->dtype_ab);
  const int64_t width = w->kernels->width;
  const int64_t steps = steps_of(w->kernels, depth);
  for (int64_t k = 0; k < depth; k += SLUICE_NATIVE_ROWS) {
    const int64_t rows = sluice_min(depth - k, SLUICE_NATIVE_ROWS);
    for (int64_t j = 0; j < cols; j += SLUICE_NATIVE_COLS) {
      const int64_t slice = sluice_min(cols - j, SLUICE_NATIVE_COLS);
      decode(w, f, k0 + k, rows, j0 + j, slice, decoded);
      for (int64_t i = 0; i < sluice_round_up(slice, width); i += GROUP) {
        const int64_t count = sluice_min(sluice_max(slice - i, 0), GROUP);
        float* out = w->b + (j + i) / width * width * steps + (j + i) % width + k / w->kernels->unit * width;
        w->kernels->pack_columns(decoded + sluice_min(i, slice - 1) * bytes, SLUICE_NATIVE_COLS, w->dtype_ab, count,
                                 rows, out, width);
      }
    }
  }
}

/* pack_b for a B that is packed along k, if the set decodes while it packs. */
static void pack_codes(const work_t* w, const sluice_gemm_form_t* f, int64_t k0, int64_t depth, int64_t j0,
                       int64_t cols) {
  const int64_t width = w->kernels->width;
  const int64_t steps = steps_of(w->kernels, depth);
  for (int64_t j = 0; j < cols; j += GROUP) {
    float* out = w->b + j / width * width * steps + j % width;
    w->kernels->pack_codes_along(f, w->dtype_ab, j0 + j, sluice_min(cols - j, GROUP), k0, depth, out, width);
  }
}

/* Returns a prefetch of B [k0 ..][j0 ..] that ends within `steps` times SLUICE_NATIVE_STEP steps. */
static sluice_native_prefetch_t aim(const work_t* w, const sluice_gemm_form_t* f, int64_t k0, int64_t depth, int64_t j0,
                                    int64_t cols, int64_t steps) {
  enum { BITS = 8 };
  int32_t bits = (int32_t)sluice_dtype_bytes(w->dtype_ab) * BITS;
  if (f->packed.format != SLUICE_PACKED_NO) bits = sluice_packed_format(f->packed.format)->bits;
  const char* at = (const char*)f->b;
  at += f->trans_b ? sluice_packed_bytes(bits, f->ldb, j0, k0) : sluice_packed_bytes(bits, f->ldb, k0, j0);
  int64_t rows = f->trans_b ? cols : depth;
  int64_t row_bytes = (f->trans_b ? depth : cols) * bits / BITS;
  return sluice_native_aim(at, rows, row_bytes, f->ldb * bits / BITS, steps, f->m <= FEW_ROWS);
}

typedef struct place_s { /* a block of C */
  int64_t i0, rows, k0, depth, j0, cols;
  int64_t stripe0, stripe; /* the columns that `sums` holds */
} place_t;

static void pack_b(const work_t* w, const sluice_gemm_form_t* f, const place_t* p) {
  if (f->packed.format == SLUICE_PACKED_NO) {
    pack_plain_b(w, f, p->k0, p->depth, p->j0, p->cols);
  } else if (w->kernels->pack_codes_across != NULL && f->trans_b) {
    pack_codes(w, f, p->k0, p->depth, p->j0, p->cols);
  } else if (w->kernels->pack_codes_across != NULL) {
    w->kernels->pack_codes_across(f, w->dtype_ab, p->k0, p->depth, p->j0, p->cols, w->b);
  } else if (f->trans_b) {
    pack_decoded_rows(w, f, p->k0, p->depth, p->j0, p->cols);
  } else {
    pack_decoded_columns(w, f, p->k0, p->depth, p->j0, p->cols);
  }
}

/* Computes every tile of one block of C. */
static void multiply(const work_t* w, const sluice_gemm_form_t* f, const blocks_t* blocks, const place_t* p,
                     sluice_native_prefetch_t* prefetch) {
  const sluice_native_kernels_t* kernels = w->kernels;
  const int64_t width = kernels->width;
  const int64_t steps = steps_of(kernels, p->depth);
  const int64_t num_tiles = sluice_ceil_div(p->rows, kernels->max_rows);
  const int64_t num_panels = sluice_ceil_div(p->cols, width);
  const int64_t height = p->rows / num_tiles; /* as tile_rows, without a division for each tile */
  const int64_t num_higher = p->rows % num_tiles;
  const int first = p->k0 == 0;
  const int last = p->k0 + p->depth == f->k;
  const int64_t bytes_c = (int64_t)sluice_dtype_bytes(w->dtype_c);
  char* c = (char*)f->c + (p->i0 * f->ldc + p->j0) * bytes_c;
  float* sums = w->sums + (p->j0 - p->stripe0);
  sluice_native_prefetch_t nothing = {0};
  /* The fields that are the same for all tiles. */
  sluice_native_tile_t t = {.depth = steps, .raw_ld = f->ldb};
  const int out_waits = !last && blocks->sums;
  t.out_ld = out_waits ? p->stripe : f->ldc;
  t.out_dtype = out_waits ? SLUICE_DTYPE_F32 : w->dtype_c;
  const int start_waits = !first && blocks->sums;
  const int starts = !first || w->beta != 0.0f;
  t.start_ld = start_waits ? p->stripe : f->ldc;
  t.start_dtype = start_waits ? SLUICE_DTYPE_F32 : w->dtype_c;
  const int64_t out_bytes = out_waits ? (int64_t)sizeof(float) : bytes_c;
  t.next_out_bytes = t.out_ld * out_bytes;
  /* Prefetch all rows of the next tile within the steps of this one. Rows that are overwritten and are whole pages
   * apart are prefetched one at a time: they share few sets of the first-level cache and would evict each other. */
  t.next_each = 1;
  if (starts || t.next_out_bytes % PAGE != 0) {
    t.next_each = (int32_t)sluice_ceil_div(kernels->max_rows, sluice_max(steps / SLUICE_NATIVE_STEP, 1));
  }
  const int by_rows = blocks->by_rows;
  const int64_t num_inner = by_rows ? num_panels : num_tiles;
  const float* raw = blocks->raw ? (const float*)f->b + p->k0 * f->ldb + p->j0 : NULL;
  int64_t i = 0;
  int64_t a_at = 0;
  for (int64_t outer = 0; outer < (by_rows ? num_tiles : num_panels); ++outer) {
    if (!by_rows) i = a_at = 0;
    for (int64_t inner = 0; inner < num_inner; ++inner) {
      const int64_t tile = by_rows ? outer : inner;
      const int64_t panel = by_rows ? inner : outer;
      t.rows = (int32_t)(height + (tile < num_higher));
      t.cols = (int32_t)sluice_min(p->cols - panel * width, width);
      t.a = w->a + a_at;
      t.b = w->b + panel * width * steps;
      t.raw = raw != NULL && tile == 0 ? raw + panel * width : NULL;
      char* own = c + (i * f->ldc + panel * width) * bytes_c;
      float* waiting = sums + i * p->stripe + panel * width;
      t.start = NULL;
      if (starts) t.start = start_waits ? (void*)waiting : own;
      t.out = out_waits ? (void*)waiting : own;
      t.next_out = NULL;
      if (inner + 1 < num_inner) {
        t.next_out = (char*)t.out + (by_rows ? width * out_bytes : t.rows * t.next_out_bytes);
      } else if (by_rows && outer + 1 < num_tiles) {
        t.next_out = (char*)t.out + t.rows * t.next_out_bytes - panel * width * out_bytes;
      }
      kernels->tile(&t, t.raw != NULL && num_tiles > FEW_TILES ? &nothing : prefetch);
      if (!by_rows) {
        i += t.rows;
        a_at += t.rows * steps;
      }
    }
    if (by_rows) {
      i += t.rows;
      a_at += t.rows * steps;
    }
  }
}

/* Computes columns [from, to) of a GEMM. next: the GEMM that this thread continues with, from column next_from, or
 * NULL. Its first block of B is prefetched during the last block here. */
static void problem(const work_t* w, const sluice_gemm_form_t* f, int64_t from, int64_t to,
                    const sluice_gemm_form_t* next, int64_t next_from) {
  const blocks_t blocks = cut(w->kernels, f, w->dtype_ab, w->dtype_c);
  place_t p;
  for (p.i0 = 0; p.i0 < f->m; p.i0 += blocks.rows) {
    p.rows = sluice_min(f->m - p.i0, blocks.rows);
    for (p.stripe0 = from; p.stripe0 < to; p.stripe0 += blocks.stripe) {
      p.stripe = sluice_min(to - p.stripe0, blocks.stripe);
      const int64_t end = p.stripe0 + p.stripe;
      for (p.k0 = 0; p.k0 < f->k; p.k0 += blocks.depth) {
        p.depth = sluice_min(f->k - p.k0, blocks.depth);
        pack_a(w, f, p.i0, p.rows, p.k0, p.depth);
        for (p.j0 = p.stripe0; p.j0 < end; p.j0 += blocks.cols) {
          p.cols = sluice_min(end - p.j0, blocks.cols);
          if (!blocks.raw) pack_b(w, f, &p);
          /* The block after this one. */
          int64_t k0 = p.k0;
          int64_t j0 = p.j0 + blocks.cols;
          if (j0 >= end) {
            k0 += blocks.depth;
            j0 = p.stripe0;
          }
          if (k0 >= f->k) {
            k0 = 0;
            j0 = end < to ? end : from;
          }
          const int over = p.k0 + p.depth == f->k && p.j0 + p.cols == to && p.i0 + p.rows == f->m;
          int64_t tiles = sluice_ceil_div(p.rows, w->kernels->max_rows);
          if (blocks.raw && tiles > FEW_TILES) --tiles;
          const int64_t steps =
              tiles * sluice_ceil_div(p.cols, w->kernels->width) * (steps_of(w->kernels, p.depth) / SLUICE_NATIVE_STEP);
          sluice_native_prefetch_t prefetch =
              aim(w, f, k0, sluice_min(f->k - k0, blocks.depth), j0, sluice_min(to - j0, blocks.cols), steps);
          if (over && next != NULL) {
            const blocks_t first = cut(w->kernels, next, w->dtype_ab, w->dtype_c);
            prefetch = aim(w, next, 0, sluice_min(next->k, first.depth), next_from,
                           sluice_min(next->n - next_from, first.cols), steps);
          } else if (over) {
            prefetch.left = 0;
          }
          multiply(w, f, &blocks, &p, &prefetch);
        }
      }
    }
  }
}

/* ---- the gemm --------------------------------------------------------------------------------------------------- */

static void native_destroy(sluice_gemm_t* gemm) { sluice_free(gemm->allocator, gemm, sizeof(sluice_gemm_native_t)); }

static int native_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  (void)gemm;
  switch (list->dtype_ab) {
    case SLUICE_DTYPE_F32:
    case SLUICE_DTYPE_BF16:
    case SLUICE_DTYPE_F16: break;
    default: return 0;
  }
  if (list->dtype_c != list->dtype_ab && list->dtype_c != SLUICE_DTYPE_F32) return 0;
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form_of(list, i, &form)) return 0;
  }
  return 1;
}

/* The workspace that the largest GEMM of the list needs. */
typedef struct room_s {
  int64_t a, b, sums; /* floats, each a multiple of a line */
} room_t;

/* Returns the kernels of the set for GEMMs of this list. */
static const sluice_native_kernels_t* kernels_for(const sluice_gemm_native_t* native,
                                                  const sluice_grouped_gemm_t* list) {
  const int has_own = list->dtype_ab == SLUICE_DTYPE_BF16 && native->kernels->pairs != NULL;
  return has_own ? native->kernels->pairs : native->kernels;
}

/* Returns the functions for bf16 if the set has them and this list needs them, else NULL. */
static const sluice_native_bf16_t* own_way(const sluice_native_kernels_t* kernels, const sluice_grouped_gemm_t* list) {
  return list->dtype_ab == SLUICE_DTYPE_BF16 ? kernels->bf16 : NULL;
}

static int is_thin(const sluice_native_kernels_t* kernels, const sluice_gemm_form_t* form, int32_t dtype_c) {
  return kernels->thin != NULL && kernels->thin->takes(form, dtype_c);
}

static room_t room_for(const sluice_native_kernels_t* kernels, const sluice_grouped_gemm_t* list) {
  room_t room = {0, 0, 0};
  const sluice_native_bf16_t* own = own_way(kernels, list);
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form_of(list, i, &form) || form.m == 0 || form.n == 0 || form.k == 0) continue;
    if (own != NULL) {
      room.a = sluice_max(room.a, own->room(&form));
      continue;
    }
    if (is_thin(kernels, &form, list->dtype_c)) {
      room.a = sluice_max(room.a, kernels->thin->room(&form));
      continue;
    }
    blocks_t b = cut(kernels, &form, list->dtype_ab, list->dtype_c);
    const int64_t steps = steps_of(kernels, b.depth);
    room.a = sluice_max(room.a, sluice_round_up(b.rows * steps + GROUP, GROUP)); /* packing writes whole registers */
    room.b = sluice_max(room.b, b.cols * steps);
    if (b.sums) room.sums = sluice_max(room.sums, sluice_round_up(b.rows * sluice_min(b.stripe, form.n), GROUP));
  }
  return room;
}

/* Shared by the threads of one call. */
typedef struct call_s {
  const sluice_gemm_native_t* native;
  const sluice_native_kernels_t* kernels;
  const sluice_grouped_gemm_t* list;
  int64_t width; /* of a panel */
  room_t room;
  char* rooms; /* the workspaces of all threads */
  sluice_runs_t runs;
} call_t;

static uint64_t room_bytes(const room_t* room) { return (uint64_t)(room->a + room->b + room->sums) * sizeof(float); }

/* The work of a panel of `width` columns, in multiply-adds. Packing it costs about as much as eight rows. */
static double panel_work(int64_t width, const sluice_gemm_form_t* f) {
  return (double)(f->m + 8) * (double)f->k * (double)width;
}

/* Computes one thread's pieces of the list. */
static void share(void* data, int index, int count) {
  (void)count;
  const call_t* call = data;
  const sluice_native_kernels_t* kernels = call->kernels;
  const sluice_grouped_gemm_t* list = call->list;
  const sluice_native_bf16_t* own = own_way(kernels, list);
  float* room = (float*)(void*)(call->rooms + room_bytes(&call->room) * (uint64_t)index);
  float* b = room + call->room.a;
  const work_t work = {kernels, list->dtype_ab, list->dtype_c, list->beta, room, b, b + call->room.b};
  if (own != NULL) own->begin();
  for (sluice_piece_t piece; sluice_runs_take(&call->runs, index, &piece);) {
    sluice_gemm_form_t form, next; /* supports() has checked all forms */
    if (!sluice_gemm_form_of(list, piece.problem, &form)) continue;
    const int goes_on = piece.next_gemm >= 0 && sluice_gemm_form_of(list, piece.next_gemm, &next);
    const sluice_gemm_form_t* after = goes_on ? &next : NULL;
    const int64_t from = piece.first * call->width;
    const int64_t to = sluice_min(piece.last * call->width, form.n);
    const int64_t next_from = piece.next_first * call->width;
    if (own != NULL) {
      own->problem(&form, list->dtype_c, list->beta, from, to, room, after, next_from);
    } else if (is_thin(kernels, &form, list->dtype_c)) {
      kernels->thin->problem(&form, list->dtype_ab, list->dtype_c, list->beta, from, to, room, after, next_from);
    } else {
      problem(&work, &form, from, to, after, next_from);
    }
  }
  if (own != NULL) own->end();
}

static double work_of(const sluice_grouped_gemm_t* list, int64_t width) {
  double work = 0;
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    if (!sluice_gemm_form_of(list, i, &form)) continue;
    if (form.m > 0 && form.n > 0) work += panel_work(width, &form) * (double)sluice_ceil_div(form.n, width);
  }
  return work;
}

/* Sets the begin of each GEMM's panels, and the fewest panels of a piece. Computes GEMMs with k = 0 without panels. */
static void number_panels(const sluice_grouped_gemm_t* list, int64_t width, int64_t* begins, int64_t* least) {
  begins[0] = 0;
  for (int64_t i = 0; i < list->count; ++i) {
    sluice_gemm_form_t form;
    begins[i + 1] = begins[i];
    least[i] = 1;
    if (!sluice_gemm_form_of(list, i, &form)) continue;
    if (sluice_gemm_form_is_trivial(&form, list->dtype_c, list->beta)) continue;
    const double each = panel_work(width, &form);
    begins[i + 1] += sluice_ceil_div(form.n, width);
    if (each < PIECE_WORK) least[i] = (int64_t)(PIECE_WORK / each);
    if (!form.trans_b) least[i] = sluice_max(least[i], PIECE_RUN / width);
  }
}

/* Divides the panels into runs of equal work, as estimated by panel_work. */
static void cut_runs(const call_t* call, double work) {
  const sluice_runs_t* runs = &call->runs;
  int64_t first = 0;
  double before = 0; /* of the GEMMs before */
  int64_t i = 0;
  for (int run = 0; run < runs->num_runs; ++run) {
    const double mark = work * (run + 1) / runs->num_runs;
    int64_t last = runs->begins[runs->num_gemms];
    for (; i < runs->num_gemms && run + 1 < runs->num_runs; ++i) {
      sluice_gemm_form_t form;
      const int64_t panels = runs->begins[i + 1] - runs->begins[i];
      if (panels == 0 || !sluice_gemm_form_of(call->list, i, &form)) continue;
      const double each = panel_work(call->width, &form);
      if (before + each * (double)panels >= mark) {
        last = sluice_max(runs->begins[i] + sluice_min((int64_t)((mark - before) / each), panels), first);
        break;
      }
      before += each * (double)panels;
    }
    sluice_runs_set(runs, run, first, last);
    first = last;
  }
}

static int threads_for(const sluice_gemm_native_t* native, double work) {
  int threads = sluice_threads_available(&native->pool);
  if (work < THREAD_WORK * threads) threads = (int)(work / THREAD_WORK);
  return threads < 1 ? 1 : threads;
}

/* One allocation holds the table of panels, the runs, and a workspace for each thread. */
static sluice_status_t native_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  const sluice_gemm_native_t* native = (const sluice_gemm_native_t*)gemm;
  const sluice_native_kernels_t* kernels = kernels_for(native, list);
  const sluice_native_bf16_t* own = own_way(kernels, list);
  call_t call = {native, kernels, list, own != NULL ? own->width : kernels->width, room_for(kernels, list)};
  const double work = work_of(list, call.width);
  const int threads = threads_for(native, work);
  const uint64_t table_bytes =
      (uint64_t)sluice_round_up((2 * list->count + 1) * (int64_t)sizeof(int64_t), (int64_t)sizeof(sluice_run_t));
  const uint64_t runs_bytes = (uint64_t)threads * sizeof(sluice_run_t);
  const uint64_t bytes = table_bytes + runs_bytes + (uint64_t)threads * room_bytes(&call.room);
  char* memory = sluice_alloc(gemm->allocator, bytes, "gemm native: packed blocks");
  if (memory == NULL) return sluice_alloc_status();
  int64_t* begins = (int64_t*)(void*)memory;
  int64_t* least = begins + list->count + 1;
  sluice_run_t* runs = (sluice_run_t*)(void*)(memory + table_bytes);
  number_panels(list, call.width, begins, least);
  call.runs = (sluice_runs_t){list->count, begins, least, threads, runs};
  call.rooms = memory + table_bytes + runs_bytes;
  cut_runs(&call, work);
  sluice_threads_run(&native->pool, threads, share, &call);
  sluice_free(gemm->allocator, memory, bytes);
  return SLUICE_OK;
}

static const sluice_gemm_vtable_t native_vtable = {
    .destroy = native_destroy,
    .supports = native_supports,
    .run = native_run,
    .decodes = 1,
};

sluice_status_t sluice_gemm_native_create_with(const sluice_threads_t* pool, sluice_allocator_t* allocator,
                                               sluice_gemm_t** out_gemm, char* why, size_t why_bytes) {
  *out_gemm = NULL;
  sluice_native_set_t sets[SLUICE_NATIVE_SETS];
  const int count = sluice_native_sets(sets);
  const sluice_native_kernels_t* kernels = NULL;
  sluice_status_t status = sluice_native_choose(sets, count, getenv("SLUICE_NATIVE"), &kernels, why, why_bytes);
  if (status != SLUICE_OK) return status;
  sluice_gemm_native_t* native = sluice_alloc_zeroed(allocator, sizeof *native, "gemm native");
  if (native == NULL) return sluice_alloc_status();
  native->base.vtable = &native_vtable;
  native->base.allocator = allocator;
  snprintf(native->base.name, sizeof native->base.name, "native (%s)", kernels->name);
  native->kernels = kernels;
  native->pool = *pool;
  *out_gemm = &native->base;
  return SLUICE_OK;
}

sluice_status_t sluice_gemm_native_open(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm, char* why,
                                        size_t why_bytes) {
  const sluice_threads_t pool = sluice_threads_find();
  return sluice_gemm_native_create_with(&pool, allocator, out_gemm, why, why_bytes);
}

sluice_status_t sluice_gemm_native_create(sluice_allocator_t* allocator, sluice_gemm_t** out_gemm) {
  char why[256];
  sluice_status_t status = sluice_gemm_native_open(allocator, out_gemm, why, sizeof why);
  if (status == SLUICE_E_NOT_FOUND) return SLUICE_FAIL(status, "gemm \"native\": %s", why);
  return status;
}
