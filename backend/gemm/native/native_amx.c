// SPDX-License-Identifier: Apache-2.0
/* GEMMs of bf16 on processors with AMX; other dtypes go to the kernels for AVX-512.
 *
 * A step multiplies a left tile, 16 rows of 32 k, by a right tile, 16 pairs of k of 16 columns. If k is contiguous in B
 * (the weight of a forward), B is the left operand, in place: it is read once and never packed. The tiles then compute
 * C^T, which is transposed when it is stored. If B is stored row by row, it is the right operand: pairs of its rows are
 * interleaved, one cache-sized block at a time. A is small and always packed. The operands of the next block are
 * prefetched, as in gemm_native.c.
 *
 * Numbers: k is cut into steps of 32 from its beginning; the last step is filled up with zeros. A step adds its even k
 * and its odd k in two chains of fused multiply-adds that start from zero, then adds one chain to the other, and both
 * to the sum so far, in f32. The processor takes and returns subnormal numbers as zeros. C is added last (beta 1). The
 * result is rounded once; the instruction that rounds to bf16 also returns subnormal results as zeros. Nothing else
 * affects an element, so a row has the same bits in every chunking.
 */
#include "backend/gemm/native/native_kernels.h"

#include <stddef.h>

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                                   \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prfchw,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prfchw,amx-tile,amx-bf16")
#endif

#include "backend/gemm/native/native_zmm.inc.h"

enum { EDGE = 16, STEP = 32, TILE_BYTES = 1024, TILE_FLOATS = 256, LINE = 64, BF16_BYTES = 2 };
/* Limits of a block: rows of C, tiles of A, of B and of sums, found by measurement, so that packed and prefetched data
 * fit into a second-level cache of 2 MiB. If B is stored row by row ("across"), a block has few rows of B, since rows
 * at a distance of a power of two compete for few sets of that cache. */
enum {
  FEW_STEPS = 3,
  MOST_ROWS = 256,
  MOST_A = 512,
  MOST_SUMS = 512,
  ACROSS_STEPS = 4,
  MOST_B = 256,
  MOST_AHEAD = 512
};
/* A weight gradient of at most GRADIENT_STEPS has the whole of k in each block, and more tiles of B, since to store and
 * reload sums would cost more than this saves. With more steps, both operands would not fit into the cache. */
enum { GRADIENT_STEPS = 16, GRADIENT_B = 512 };
/* With more rows of C than these, a GEMM does not wait for memory. With fewer, if B is stored row by row and
 * its rows are a page long or more, the hardware prefetcher is faster than a software prefetch. */
enum { FEW_ROWS = 64, PAGE = 4096 };

/* ---- packing --------------------------------------------------------------------------------------------------- */

/* A or B: element (o, k), where o is the row or column of C. */
typedef struct side_s {
  const char* data;
  int64_t ld; /* bytes */
  int along;  /* 1: k is contiguous; 0: o is */
  int bits;   /* of an element: 16, or those of a packed weight */
} side_t;

static const char* side_at(const side_t* s, int64_t o, int64_t k) {
  return s->data + (s->along ? o * s->ld + k * s->bits / 8 : k * s->ld + o * s->bits / 8);
}

/* Words 0, 16, 1, 17, ...: makes pairs of k from a half for an even k and a half for the odd k after it. */
INLINE __m512i interleave(__m512i halves) {
  const __m512i words = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(words, halves);
}

/* Packs a tile of `count` <= 16 o and `depth` <= 32 k, padded with zeros: left [o][k], right [k / 2][o] in pairs. */
INLINE void pack_tile(const side_t* s, int64_t o, int64_t count, int64_t k, int64_t depth, int right, char* out) {
  const char* at = side_at(s, o, k);
  __m512 r[LANES];
  if (s->along) {
    const __mmask32 mask = depth >= STEP ? 0xffffffffu : (1u << depth) - 1u;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      r[i] = _mm512_setzero_ps();
      if (i < count) r[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, at + i * s->ld));
    }
  } else {
    const __mmask16 mask = first_lanes(count);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      __m256i even = _mm256_setzero_si256(), odd = _mm256_setzero_si256();
      if (2 * i < depth) even = _mm256_maskz_loadu_epi16(mask, at + 2 * i * s->ld);
      if (2 * i + 1 < depth) odd = _mm256_maskz_loadu_epi16(mask, at + (2 * i + 1) * s->ld);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
      r[i] = _mm512_castsi512_ps(interleave(both));
    }
  }
  if (s->along == right) transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) _mm512_store_ps(out + i * LINE, r[i]);
}

INLINE void ask(sluice_native_prefetch_t* p, int64_t lines) {
  if (p->left <= 0) return;
  const char* at = p->at;
  int64_t inner = p->inner;
  p->left -= lines;
  do {
    __builtin_prefetch(at, 0, 2);
    at = sluice_native_next_line(p, at, &inner);
  } while (--lines > 0);
  p->at = at;
  p->inner = inner;
}

/* Packs two adjacent whole right tiles if o is contiguous, so that each line of memory is read once. */
INLINE void pack_two(const char* at, int64_t ld, char* out, int64_t out_tile) {
#pragma GCC unroll 4
  for (int i = 0; i < LANES; ++i) {
    const __m512i even = _mm512_loadu_si512(at), odd = _mm512_loadu_si512(at + ld);
    _mm512_store_si512(out, interleave(_mm512_shuffle_i64x2(even, odd, 0x44)));
    _mm512_store_si512(out + out_tile, interleave(_mm512_shuffle_i64x2(even, odd, 0xee)));
    at += 2 * ld;
    out += LINE;
  }
}

/* Packs one step of o [o0 ..][k ..]: a tile for each 16 o, out_tile bytes apart. */
static void pack_step(const side_t* s, int64_t o0, int64_t count, int64_t k, int64_t depth, int right, char* out,
                      int64_t out_tile, sluice_native_prefetch_t* prefetch) {
  const int64_t per_tile = prefetch->per_step;
  int64_t o = 0;
  for (; right && !s->along && depth == STEP && count - o >= 2 * EDGE; o += 2 * EDGE, out += 2 * out_tile) {
    pack_two(side_at(s, o0 + o, k), s->ld, out, out_tile);
    ask(prefetch, 2 * per_tile);
  }
  for (; o < count; o += EDGE, out += out_tile) {
    pack_tile(s, o0 + o, sluice_min(count - o, EDGE), k, depth, right, out);
    ask(prefetch, per_tile);
  }
}

/* Packs o [o0 ..][k0 ..] as [tile][step]. */
static void pack(const side_t* s, int64_t o0, int64_t count, int64_t k0, int64_t depth, int right, char* out,
                 sluice_native_prefetch_t* prefetch) {
  const int64_t out_tile = sluice_ceil_div(depth, STEP) * TILE_BYTES;
  for (int64_t k = 0; k < depth; k += STEP, out += TILE_BYTES) {
    pack_step(s, o0, count, k0 + k, sluice_min(depth - k, STEP), right, out, out_tile, prefetch);
  }
}

/* The same for a packed B that is stored row by row, to right tiles. Decodes the rows of a step first. */
static void pack_decoded(const sluice_gemm_form_t* f, int64_t j0, int64_t cols, int64_t k0, int64_t depth, char* out,
                         sluice_native_prefetch_t* prefetch) {
  static _Thread_local _Alignas(64) char decoded[STEP * SLUICE_NATIVE_COLS * BF16_BYTES];
  const int64_t row_bytes = SLUICE_NATIVE_COLS * BF16_BYTES;
  const side_t side = {decoded, row_bytes, 0, 8 * BF16_BYTES};
  const int64_t out_tile = sluice_ceil_div(depth, STEP) * TILE_BYTES;
  for (int64_t k = 0; k < depth; k += STEP, out += TILE_BYTES) {
    const int64_t rows = sluice_min(depth - k, STEP);
    for (int64_t j = 0; j < cols; j += SLUICE_NATIVE_COLS) {
      const int64_t slice = sluice_min(cols - j, SLUICE_NATIVE_COLS);
      for (int64_t r = 0; r < rows; ++r) {
        decode(&f->packed, f->b, f->ldb, k0 + k + r, j0 + j, slice, SLUICE_DTYPE_BF16, decoded + r * row_bytes);
      }
      pack_step(&side, 0, slice, 0, rows, 1, out + j / EDGE * out_tile, out_tile, prefetch);
    }
  }
}

INLINE void decode_left_as(const int32_t format, const sluice_gemm_form_t* f, int64_t j0, int64_t cols, int64_t k0,
                           int64_t depth, char* out) {
  for (int64_t j = 0; j < sluice_round_up(cols, EDGE); ++j) {
    char* to = out + j / EDGE * sluice_ceil_div(depth, STEP) * TILE_BYTES + j % EDGE * LINE;
    const packed_row_t row = packed_row(&f->packed, f->b, f->ldb, j0 + sluice_min(j, cols - 1));
    for (int64_t k = 0; k < depth; k += STEP, to += TILE_BYTES) {
      const vf pairs = decode_pairs(format, &row, k0 + k, j < cols ? depth - k : 0);
      _mm512_store_ps(to, pairs);
    }
  }
}

/* Decodes a packed B in which k is contiguous to left tiles. */
static void decode_left(const sluice_gemm_form_t* f, int64_t j0, int64_t cols, int64_t k0, int64_t depth, char* out) {
  switch (f->packed.format) {
    case SLUICE_PACKED_MXFP4: decode_left_as(SLUICE_PACKED_MXFP4, f, j0, cols, k0, depth, out); break;
    case SLUICE_PACKED_FP8: decode_left_as(SLUICE_PACKED_FP8, f, j0, cols, k0, depth, out); break;
    case SLUICE_PACKED_INT8: decode_left_as(SLUICE_PACKED_INT8, f, j0, cols, k0, depth, out); break;
    default: decode_left_as(SLUICE_PACKED_INT4, f, j0, cols, k0, depth, out); break;
  }
}

/* ---- a group of tiles ------------------------------------------------------------------------------------------- */

/* A group of lefts x rights tiles of sums, over one block of k. */
typedef struct group_s {
  const char* left;
  int64_t left_tile, left_step, left_ld; /* bytes from tile to tile, from step to step, from row to row */
  const char* right;                     /* packed */
  int64_t right_tile;
  int64_t steps;      /* read from `left` */
  int64_t tail;       /* k after these steps, which the group packs from `side` */
  const side_t* side; /* the tail begins at (o, k) */
  int64_t o, k, count;
  float* sums; /* kept between blocks of k */
  int64_t sums_left, sums_right;
  int first, last; /* whether this is the first, the last block of k */
  int turned;      /* 1: a left row is a column of C */
  char* c;
  int64_t ldc; /* bytes */
  int64_t rows, cols;
  int64_t ahead; /* bytes from the rows of C to those of the next group, which are prefetched; 0: no prefetch */
  int32_t dtype_c;
  int adds; /* 1: adds to C */
} group_t;

/* A compiler barrier: the compiler does not know which memory the loads of tiles read. */
#define SETTLE() __asm__ volatile("" ::: "memory")

#define LEFT(register, i)  _tile_loadd(register, left + (i)*left_tile, left_ld)
#define RIGHT(register, i) _tile_loadd(register, right + (i)*g->right_tile, LINE)

/* One step. Registers 0 to 3 hold sums: number l * rights + r. */
INLINE void multiply(const int lefts, const int rights, const group_t* g, const char* left, int64_t left_tile,
                     int64_t left_ld, const char* right) {
  if (lefts == 2 && rights == 2) {
    LEFT(4, 0);
    RIGHT(6, 0);
    _tile_dpbf16ps(0, 4, 6);
    RIGHT(7, 1);
    _tile_dpbf16ps(1, 4, 7);
    LEFT(5, 1);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } else if (lefts == 1) {
    LEFT(4, 0);
    RIGHT(5, 0);
    _tile_dpbf16ps(0, 4, 5);
    if (rights > 1) {
      RIGHT(6, 1);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (rights > 2) {
      RIGHT(7, 2);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (rights > 3) {
      RIGHT(5, 3);
      _tile_dpbf16ps(3, 4, 5);
    }
  } else {
    RIGHT(4, 0);
    LEFT(5, 0);
    _tile_dpbf16ps(0, 5, 4);
    LEFT(6, 1);
    _tile_dpbf16ps(1, 6, 4);
    if (lefts > 2) {
      LEFT(7, 2);
      _tile_dpbf16ps(2, 7, 4);
    }
    if (lefts > 3) {
      LEFT(5, 3);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
}

#define EACH_SUM(X)         \
  X(0)                      \
  if (lefts * rights > 1) { \
    X(1)                    \
  }                         \
  if (lefts * rights > 2) { \
    X(2)                    \
  }                         \
  if (lefts * rights > 3) { \
    X(3)                    \
  }
#define WAITING(i) (g->sums + (i) / rights * g->sums_left + (i) % rights * g->sums_right)
#define ZERO(i)    _tile_zero(i);
#define RESUME(i)  _tile_loadd(i, WAITING(i), LINE);
#define WAIT(i)    _tile_stored(i, WAITING(i), LINE);
#define GIVE(i)    _tile_stored(i, sums + (i)*TILE_FLOATS, LINE);

/* Rounds to nearest even with the instruction that turns subnormal numbers into zeros. */
INLINE void store_rounded(int32_t dtype, char* at, lanes_t lanes, vf x) {
  if (dtype == SLUICE_DTYPE_BF16) {
    _mm256_mask_storeu_epi16(at, lanes, (__m256i)_mm512_cvtneps_pbh(x));
  } else {
    store(dtype, at, lanes, x);
  }
}

/* Writes the tile of C at (i, j) from its sum. */
INLINE void finish(const group_t* g, const float* sum, int64_t i, int64_t j) {
  const int64_t rows = g->rows - i;
  const lanes_t lanes = first_lanes(g->cols - j);
  const int32_t dtype = g->dtype_c == SLUICE_DTYPE_F32 ? SLUICE_DTYPE_F32 : SLUICE_DTYPE_BF16;
  char* at = g->c + i * g->ldc + j * (dtype == SLUICE_DTYPE_F32 ? 4 : BF16_BYTES);
  vf r[LANES];
#pragma GCC unroll 16
  for (int l = 0; l < LANES; ++l) r[l] = _mm512_load_ps(sum + l * LANES);
  if (g->turned) transpose(r);
#pragma GCC unroll 16
  for (int l = 0; l < LANES; ++l) {
    if (l >= rows) continue;
    if (g->ahead != 0) __builtin_prefetch(at + g->ahead, 1, 3);
    if (g->adds) r[l] = _mm512_add_ps(r[l], load(dtype, at, lanes));
    store_rounded(dtype, at, lanes, r[l]);
    at += g->ldc;
  }
}

/* Writes two adjacent whole tiles in bf16. The line of C is written as a whole, so it is not read from memory first. */
INLINE void finish_two(const group_t* g, const float* sum, int64_t i, int64_t j) {
  const int64_t rows = sluice_min(g->rows - i, EDGE);
  char* at = g->c + i * g->ldc + j * BF16_BYTES;
  for (int64_t l = 0; l < rows; ++l) {
    vf x = _mm512_load_ps(sum + l * LANES), y = _mm512_load_ps(sum + TILE_FLOATS + l * LANES);
    if (g->ahead != 0) __builtin_prefetch(at + g->ahead, 1, 3);
    if (g->adds) {
      x = _mm512_add_ps(x, load(SLUICE_DTYPE_BF16, at, (lanes_t)0xffff));
      y = _mm512_add_ps(y, load(SLUICE_DTYPE_BF16, at + EDGE * BF16_BYTES, (lanes_t)0xffff));
    }
    _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    at += g->ldc;
  }
}

INLINE void group_of(const int lefts, const int rights, const group_t* g, sluice_native_prefetch_t* prefetch) {
  const char* left = g->left;
  const char* right = g->right;
  SETTLE();
  if (g->first) {
    EACH_SUM(ZERO)
  } else {
    EACH_SUM(RESUME)
  }
  const int64_t per_step = prefetch->per_step;
  for (int64_t s = 0; s < g->steps; ++s) {
    multiply(lefts, rights, g, left, g->left_tile, g->left_ld, right);
    ask(prefetch, per_step);
    left += g->left_step;
    right += TILE_BYTES;
  }
  for (int64_t k = 0; k < g->tail; k += STEP) {
    static _Thread_local _Alignas(64) char packed[4 * TILE_BYTES];
    for (int l = 0; l < lefts; ++l) {
      pack_tile(g->side, g->o + l * EDGE, g->count, g->k + k, sluice_min(g->tail - k, STEP), 0,
                packed + l * TILE_BYTES);
    }
    SETTLE();
    multiply(lefts, rights, g, packed, TILE_BYTES, LINE, right);
    right += TILE_BYTES;
  }
  if (!g->last) {
    EACH_SUM(WAIT)
    return;
  }
  /* Static, as `packed` above: gcc 12's address sanitizer does not keep this alignment for arrays on the stack. */
  static _Thread_local _Alignas(64) float sums[4 * TILE_FLOATS];
  EACH_SUM(GIVE)
  for (int l = 0; l < lefts; ++l) {
    for (int r = 0; r < rights; ++r) {
      const float* sum = sums + (l * rights + r) * TILE_FLOATS;
      if (!g->turned && g->dtype_c == SLUICE_DTYPE_BF16 && r + 1 < rights && g->cols >= (r + 2) * EDGE) {
        finish_two(g, sum, l * EDGE, r * EDGE);
        ++r;
      } else if (g->turned) {
        finish(g, sum, r * EDGE, l * EDGE);
      } else {
        finish(g, sum, l * EDGE, r * EDGE);
      }
    }
  }
}

#define GROUP(lefts, rights)                                                                   \
  static void group_##lefts##x##rights(const group_t* g, sluice_native_prefetch_t* prefetch) { \
    group_of(lefts, rights, g, prefetch);                                                      \
  }
GROUP(1, 1)
GROUP(1, 2)
GROUP(1, 3)
GROUP(1, 4)
GROUP(2, 1)
GROUP(3, 1)
GROUP(4, 1)
GROUP(2, 2)

static void run_group(int64_t lefts, int64_t rights, const group_t* g, sluice_native_prefetch_t* prefetch) {
  static void (*const groups[4][4])(const group_t*, sluice_native_prefetch_t*) = {
      {group_1x1, group_1x2, group_1x3, group_1x4}, {group_2x1, group_2x2}, {group_3x1}, {group_4x1}};
  groups[lefts - 1][rights - 1](g, prefetch);
}

/* ---- one GEMM ------------------------------------------------------------------------------------------------ */

enum { MOST_TILES = 4 }; /* of columns of C whose rows of B are read together */

typedef struct cut_s {
  int64_t rows, steps, cols; /* of a block: rows and columns of whole tiles, steps of 32 k */
  int64_t a, b, sums;        /* tiles of workspace; b: also for decoded rows of a B in which k is contiguous */
} cut_t;

/* Chooses blocks. If k is divided, sums are kept between its blocks, and columns are finished before the next begin. */
static cut_t cut(const sluice_gemm_form_t* f) {
  cut_t c;
  const int64_t steps = sluice_ceil_div(f->k, STEP);
  const int is_gradient = f->trans_a && steps <= GRADIENT_STEPS;
  int64_t most_rows = MOST_ROWS;
  if (!f->trans_b && steps > ACROSS_STEPS) most_rows /= 2;
  const int64_t rows = sluice_ceil_div(sluice_ceil_div(f->m, sluice_ceil_div(f->m, most_rows)), EDGE);
  c.rows = rows * EDGE;
  const int64_t most = f->trans_b ? MOST_A / rows : is_gradient ? GRADIENT_STEPS : ACROSS_STEPS;
  c.steps = sluice_ceil_div(steps, sluice_ceil_div(steps, most));
  const int64_t whole = sluice_ceil_div(f->n, EDGE) * EDGE;
  c.cols = whole;
  if (!f->trans_b) c.cols = sluice_min(whole, (c.steps > ACROSS_STEPS ? GRADIENT_B : MOST_B) / c.steps * EDGE);
  if (f->trans_b && c.steps < steps) c.cols = sluice_min(whole, MOST_SUMS / rows * EDGE);
  const int64_t cols = c.cols / EDGE;
  c.a = rows * c.steps;
  c.b = f->trans_b ? 0 : cols * c.steps;
  if (f->trans_b && f->packed.format != SLUICE_PACKED_NO) c.b = sluice_min(MOST_TILES * c.steps, MOST_AHEAD);
  c.sums = c.steps < steps ? rows * cols : 0;
  return c;
}

static int64_t room(const sluice_gemm_form_t* f) {
  const cut_t c = cut(f);
  return (c.a + c.b + c.sums) * TILE_FLOATS;
}

/* Returns a prefetch of B [k0 ..][j0 ..] of a GEMM with m rows that ends within `calls` calls of ask(). */
static sluice_native_prefetch_t aim(const side_t* b, int64_t m, int64_t k0, int64_t depth, int64_t j0, int64_t cols,
                                    int64_t calls) {
  const char* at = side_at(b, j0, k0);
  const int64_t rows = b->along ? cols : depth, bytes = (b->along ? depth : cols) * b->bits / 8;
  sluice_native_prefetch_t p = sluice_native_aim(at, rows, bytes, b->ld, calls, m <= FEW_ROWS);
  if (!b->along && m <= FEW_ROWS && b->ld >= PAGE) p.left = 0;
  return p;
}

typedef struct block_s {
  const cut_t* cut;
  int64_t i0, rows, k0, depth, j0, cols;
  char *a, *b;
  float* sums;
} block_t;

/* Returns the fields that are the same for all groups of a block. */
static group_t group_in(const sluice_gemm_form_t* f, const block_t* p, int32_t dtype_c, float beta) {
  group_t g = {.first = p->k0 == 0, .last = p->k0 + p->depth == f->k, .turned = f->trans_b};
  g.dtype_c = dtype_c;
  g.adds = beta != 0.0f;
  g.ldc = f->ldc * (int64_t)sluice_dtype_bytes(dtype_c);
  return g;
}

static void place(group_t* g, const sluice_gemm_form_t* f, const block_t* p, int64_t i, int64_t j) {
  g->c = (char*)f->c + (p->i0 + i) * g->ldc + (p->j0 + j) * (int64_t)sluice_dtype_bytes(g->dtype_c);
  g->rows = p->rows - i;
  g->cols = p->cols - j;
  const int64_t high = p->cut->rows / EDGE;
  g->sums = p->sums + (j / EDGE * high + i / EDGE) * TILE_FLOATS;
  g->sums_left = (g->turned ? high : 1) * TILE_FLOATS;
  g->sums_right = (g->turned ? 1 : high) * TILE_FLOATS;
}

/* Columns of C whose rows of B are read together: enough for four tiles of sums, or fewer if the rows of B are so long
 * that prefetched rows would not stay in the cache. */
static int64_t columns_of(int64_t high, int64_t steps) {
  int64_t tiles = high == 1 ? MOST_TILES : high == 3 || high == 4 ? 1 : 2;
  while (tiles > 1 && tiles * steps > MOST_AHEAD) tiles /= 2;
  return tiles * EDGE;
}

/* Multiplies by a B in which k is contiguous: reads it in place, or decodes a packed B to left tiles. after: the
 * prefetch of the B that is read after this block. */
static void multiply_along(const sluice_gemm_form_t* f, const side_t* b, const block_t* p, group_t* g,
                           const sluice_native_prefetch_t* after) {
  const int64_t high = sluice_ceil_div(p->rows, EDGE), steps = sluice_ceil_div(p->depth, STEP);
  const int64_t together = columns_of(high, steps);
  const int64_t most = high <= 4 ? high : 2, calls = steps * sluice_ceil_div(high, most);
  g->left_tile = EDGE * b->ld;
  g->left_step = STEP * BF16_BYTES;
  g->left_ld = b->ld;
  g->right_tile = steps * TILE_BYTES;
  g->side = b;
  for (int64_t j = 0, cols; j < p->cols; j += cols) {
    const int64_t left = p->cols - j;
    cols = left >= EDGE ? sluice_min(left / EDGE * EDGE, together) : left;
    g->count = sluice_min(cols, EDGE);
    g->steps = cols < EDGE ? 0 : p->depth / STEP;
    g->tail = p->depth - g->steps * STEP;
    g->left = side_at(b, p->j0 + j, p->k0);
    g->o = p->j0 + j;
    g->k = p->k0 + g->steps * STEP;
    if (f->packed.format != SLUICE_PACKED_NO) {
      decode_left(f, p->j0 + j, cols, p->k0, p->depth, p->b);
      g->left = p->b;
      g->left_tile = steps * TILE_BYTES;
      g->left_step = TILE_BYTES;
      g->left_ld = LINE;
      g->steps = steps;
      g->tail = 0;
    }
    sluice_native_prefetch_t prefetch = *after;
    if (cols < left) prefetch = aim(b, f->m, p->k0, p->depth, p->j0 + j + cols, sluice_min(left - cols, cols), calls);
    for (int64_t i = 0; i < high; i += most) {
      const int64_t rights = sluice_min(high - i, most);
      place(g, f, p, i * EDGE, j);
      g->right = p->a + i * g->right_tile;
      run_group(sluice_ceil_div(cols, EDGE), rights, g, &prefetch);
    }
  }
}

/* Multiplies by tiles of a B that is stored row by row. */
static void multiply_across(const sluice_gemm_form_t* f, const block_t* p, group_t* g,
                            sluice_native_prefetch_t* prefetch) {
  const int64_t high = sluice_ceil_div(p->rows, EDGE), wide = sluice_ceil_div(p->cols, EDGE);
  const int64_t bytes = (int64_t)sluice_dtype_bytes(g->dtype_c);
  g->steps = sluice_ceil_div(p->depth, STEP);
  g->left_tile = g->right_tile = g->steps * TILE_BYTES;
  g->left_step = TILE_BYTES;
  g->left_ld = LINE;
  /* With few steps most of the time goes into writing C, so longer runs of C matter more than using tiles twice. */
  const int64_t tall = g->steps < FEW_STEPS ? 1 : 2;
  for (int64_t i = 0; i < high; i += tall) {
    const int64_t lefts = sluice_min(high - i, tall), most = lefts == 2 ? 2 : 4;
    g->left = p->a + i * g->left_tile;
    for (int64_t j = 0; j < wide; j += most) {
      place(g, f, p, i * EDGE, j * EDGE);
      g->ahead = (j + most < wide ? most * EDGE * bytes : lefts * EDGE * g->ldc - j * EDGE * bytes);
      g->right = p->b + j * g->right_tile;
      run_group(lefts, sluice_min(wide - j, most), g, prefetch);
    }
  }
}

static side_t side_a(const sluice_gemm_form_t* f) {
  return (side_t){f->a, f->lda * BF16_BYTES, !f->trans_a, 8 * BF16_BYTES};
}
static side_t side_b(const sluice_gemm_form_t* f) {
  const int bits = f->packed.format != SLUICE_PACKED_NO ? bits_of(f->packed.format) : 8 * BF16_BYTES;
  return (side_t){f->b, f->ldb * bits / 8, f->trans_b, bits};
}

/* Returns a prefetch of the first part of B that a GEMM reads if it begins with column `from`. */
static sluice_native_prefetch_t aim_first(const sluice_gemm_form_t* f, int64_t from, int64_t calls) {
  const cut_t c = cut(f);
  const side_t b = side_b(f);
  const int64_t cols = f->trans_b ? columns_of(c.rows / EDGE, c.steps) : c.cols;
  return aim(&b, f->m, 0, sluice_min(f->k, c.steps * STEP), from, sluice_min(f->n - from, cols), calls);
}

static void problem(const sluice_gemm_form_t* f, int32_t dtype_c, float beta, int64_t from, int64_t to, float* memory,
                    const sluice_gemm_form_t* next, int64_t next_from) {
  const cut_t c = cut(f);
  const side_t a = side_a(f), b = side_b(f);
  block_t p = {.cut = &c, .a = (char*)memory};
  p.b = p.a + c.a * TILE_BYTES;
  p.sums = (float*)(void*)(p.b + c.b * TILE_BYTES);
  int64_t packed_k = -1, packed_j = -1; /* the block of B in p.b */
  for (p.j0 = from; p.j0 < to; p.j0 += c.cols) {
    p.cols = sluice_min(to - p.j0, c.cols);
    for (p.i0 = 0; p.i0 < f->m; p.i0 += c.rows) {
      p.rows = sluice_min(f->m - p.i0, c.rows);
      for (p.k0 = 0; p.k0 < f->k; p.k0 += c.steps * STEP) {
        p.depth = sluice_min(f->k - p.k0, c.steps * STEP);
        group_t g = group_in(f, &p, dtype_c, beta);
        const int64_t steps = sluice_ceil_div(p.depth, STEP), high = sluice_ceil_div(p.rows, EDGE),
                      wide = sluice_ceil_div(p.cols, EDGE);
        /* The block after this one. */
        int64_t k0 = p.k0 + p.depth, j0 = p.j0;
        if (k0 == f->k) {
          k0 = 0;
          if (p.i0 + p.rows == f->m) j0 += p.cols;
        }
        sluice_native_prefetch_t after = {0}, nothing = {0};
        int64_t calls = high <= 4 ? steps : sluice_ceil_div(high, 2) * steps;
        if (!f->trans_b)
          calls = wide * steps + sluice_ceil_div(high, 2) * sluice_ceil_div(wide, high == 1 ? 4 : 2) * steps;
        if (j0 < to) {
          int64_t cols = f->trans_b ? columns_of(high, steps) : c.cols;
          after = aim(&b, f->m, k0, sluice_min(f->k - k0, c.steps * STEP), j0, sluice_min(to - j0, cols), calls);
        } else if (next != NULL) {
          after = aim_first(next, next_from, calls);
        }
        pack(&a, p.i0, p.rows, p.k0, p.depth, f->trans_b, p.a, &nothing);
        if (f->trans_b) {
          multiply_along(f, &b, &p, &g, &after);
          continue;
        }
        if (k0 == p.k0 && j0 == p.j0) after = nothing;
        if (packed_k == p.k0 && packed_j == p.j0) {
          /* this block of B is already packed */
        } else if (f->packed.format != SLUICE_PACKED_NO) {
          pack_decoded(f, p.j0, p.cols, p.k0, p.depth, p.b, &after);
        } else {
          pack(&b, p.j0, p.cols, p.k0, p.depth, 1, p.b, &after);
        }
        packed_k = p.k0;
        packed_j = p.j0;
        multiply_across(f, &p, &g, &after);
      }
    }
  }
}

/* ---- the processor ---------------------------------------------------------------------------------------------- */

typedef struct tile_config_s {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config_t;

static void begin(void) {
  tile_config_t config = {.palette = 1};
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = LINE;
    config.rows[i] = EDGE;
  }
  SETTLE();
  _tile_loadconfig(&config);
}

static void end(void) { _tile_release(); }

static const sluice_native_bf16_t bf16 = {.width = 64, .room = room, .begin = begin, .end = end, .problem = problem};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static sluice_native_kernels_t kernels;
static const sluice_native_kernels_t* found;

/* A process must ask Linux for the tile registers, 8 KiB of each thread's state. Linux refuses if a thread has an
 * alternative signal stack that is too small to save them. */
static void look(void) {
  enum { ARCH_REQ_XCOMP_PERM_ = 0x1023, XFEATURE_XTILEDATA_ = 18 };
  enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AVX512_BF16 = 1 << 5 };
  unsigned a, b, c, d;
  const sluice_native_kernels_t* others = sluice_native_avx512();
  if (others == NULL || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  if ((d & AMX_BF16) == 0 || (d & AMX_TILE) == 0) return;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & AVX512_BF16) == 0) return; /* all with AMX have it so far */
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM_, XFEATURE_XTILEDATA_) != 0) return;
  kernels = *others;
  kernels.name = "amx";
  kernels.bf16 = &bf16;
  found = &kernels;
}

const sluice_native_kernels_t* sluice_native_amx(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, look);
  return found;
}

#else

const sluice_native_kernels_t* sluice_native_amx(void) { return NULL; }

#endif
