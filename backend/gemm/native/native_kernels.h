// SPDX-License-Identifier: Apache-2.0
/* The kernels of "native": a table for each instruction set, chosen at run time. All have the same bits, except for
 * bf16 in a table with a sluice_native_bf16_t or kernels that multiply pairs. Internal to backend/gemm/native. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "backend/gemm/gemm_form.h"
#include "backend/gemm/native/native_prefetch.h"
#include "sluice/base.h"

/* A tile prefetches once every this many steps of k, from the operand that is packed next. */
enum { SLUICE_NATIVE_STEP = 8 };

/* Rows and columns of a packed weight that are decoded to the stack at a time, and packed into a panel from there. */
enum { SLUICE_NATIVE_ROWS = 16, SLUICE_NATIVE_COLS = 256 };

/* One tile: out[i][j] = start[i][j] + sum over k, ascending, of a[k][i] * b[k][j], with one fused multiply-add per
 * step. The sum of an element is this chain for every height and place of the tile, and wherever k is cut into blocks.
 * For kernels that multiply pairs, each float of a and b holds two bf16: an even k and the odd k after it. */
typedef struct sluice_native_tile_s {
  int64_t depth;     /* steps: one k each, or a pair of k */
  const float* a;    /* [depth][rows] */
  float* b;          /* [depth][width] */
  const float* raw;  /* NULL, or B, [depth][cols]: the tile reads B from here, and packs it into b */
  int64_t raw_ld;    /* elements */
  const void* start; /* NULL: zeros */
  void* out;
  int64_t start_ld, out_ld; /* elements */
  int32_t start_dtype, out_dtype;
  int32_t rows, cols;     /* rows in [1, max_rows], cols in [1, width] */
  const char* next_out;   /* the rows of C of the next tile, to prefetch; or NULL */
  int64_t next_out_bytes; /* from one of these rows to the next */
  int32_t next_each;      /* rows prefetched per SLUICE_NATIVE_STEP steps of k, at least 1 */
} sluice_native_tile_t;

/* Functions of a set that computes GEMMs of bf16 without tiles of f32. */
typedef struct sluice_native_bf16_s {
  int32_t width; /* columns of C in a panel; a thread computes whole panels */
  /* Floats of workspace for a GEMM: a multiple of a cache line. m, n and k are positive, here and below. */
  int64_t (*room)(const sluice_gemm_form_t* form);
  void (*begin)(void); /* called on each thread before its GEMMs */
  void (*end)(void);   /* called on each thread after its GEMMs */
  /* Computes columns [from, to) of a GEMM. next: the thread's next GEMM, from column next_from on; or NULL. */
  void (*problem)(const sluice_gemm_form_t* form, int32_t dtype_c, float beta, int64_t from, int64_t to, float* room,
                  const sluice_gemm_form_t* next, int64_t next_from);
} sluice_native_bf16_t;

/* Functions of a set that computes GEMMs of few rows without packing B, with the same bits. */
typedef struct sluice_native_thin_s {
  int (*takes)(const sluice_gemm_form_t* form, int32_t dtype_c);
  /* Floats of workspace for a GEMM that takes() accepts: a multiple of a cache line. */
  int64_t (*room)(const sluice_gemm_form_t* form);
  /* As in sluice_native_bf16_t, for any dtype. */
  void (*problem)(const sluice_gemm_form_t* form, int32_t dtype_ab, int32_t dtype_c, float beta, int64_t from,
                  int64_t to, float* room, const sluice_gemm_form_t* next, int64_t next_from);
} sluice_native_thin_t;

typedef struct sluice_native_kernels_s {
  const char* name;
  int32_t max_rows; /* of a tile */
  int32_t width;    /* of a tile */
  int32_t unit;     /* k per step of a tile, and per packed float: 1, or 2 (bf16) */
  /* Reads `rows` floats of a and `width` floats of b per step, for any `cols` (of raw: `cols` floats). Writes the
   * elements of the tile, and b if raw is not NULL. */
  void (*tile)(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch);
  /* out[k][i] = in[i][k], f32, for i < count <= 16 and k < depth; row k of out begins at k * out_ld. If out_ld is at
   * least 16, the lanes past `count` become zeros. Else out_ld is count, at most max_rows, and the last row may be
   * written up to lane 15. With pairs, row s holds in[i][2 s] and in[i][2 s + 1], or zero if that is past depth. */
  void (*pack_rows)(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                    int64_t out_ld);
  /* out[k][i] = in[k][i], f32; otherwise as pack_rows. */
  void (*pack_columns)(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                       int64_t out_ld);
  /* As sluice_packed_decode, with the same bits, to f32, bf16 or f16. Decodes at most SLUICE_NATIVE_COLS columns; the
   * first is a multiple of 16. May write up to 15 elements past `count`. */
  sluice_packed_decode_fn_t decode;
  /* As pack_rows, for rows [row, row + count) of a B that is packed along k, from k0 on, a multiple of
   * SLUICE_PACKED_LEAST_COLS. out_ld is at least 16; lanes past `count` may have any values. NULL: use `decode`. */
  void (*pack_codes_along)(const sluice_gemm_form_t* form, int32_t dtype, int64_t row, int64_t count, int64_t k0,
                           int64_t depth, float* out, int64_t out_ld);
  /* Decodes B [k0 ..][j0 ..], which is packed row by row, to panels of [depth][width], with zeros after the last
   * column. j0 is a multiple of `width`. */
  void (*pack_codes_across)(const sluice_gemm_form_t* form, int32_t dtype, int64_t k0, int64_t depth, int64_t j0,
                            int64_t cols, float* out);
  const sluice_native_bf16_t* bf16;            /* NULL: bf16 uses tiles, as the other dtypes */
  const sluice_native_thin_t* thin;            /* NULL: GEMMs of few rows use tiles, as those of many rows */
  const struct sluice_native_kernels_s* pairs; /* the table that GEMMs of bf16 use instead of this one, or NULL */
} sluice_native_kernels_t;

/* NULL if this processor lacks AMX (TILE, BF16), AVX512-BF16 or AVX-512, or if Linux refuses AMX to this process. */
const sluice_native_kernels_t* sluice_native_amx(void);
/* NULL if this processor lacks AVX512-BF16 or AVX-512. */
const sluice_native_kernels_t* sluice_native_avx512_bf16(void);
/* NULL if this processor lacks AVX-512 (F, BW, DQ, VL). */
const sluice_native_kernels_t* sluice_native_avx512(void);
/* The bf16 of each code of MXFP4 with each scale. Filled by sluice_native_avx512, for the sets that use it. */
extern uint16_t sluice_native_mxfp4_tables[256][16];
/* NULL if this processor lacks AVX2, FMA or F16C. */
const sluice_native_kernels_t* sluice_native_avx2(void);

typedef struct sluice_native_set_s {
  const char* name;                       /* a value of SLUICE_NATIVE */
  const char* needs;                      /* instruction sets, for messages */
  const sluice_native_kernels_t* kernels; /* NULL: this processor cannot run them */
} sluice_native_set_t;

enum { SLUICE_NATIVE_SETS = 4 };

/* Writes all sets, the widest first; returns their number. */
int sluice_native_sets(sluice_native_set_t out_sets[SLUICE_NATIVE_SETS]);

/* Returns the set named `wanted`, or, if that is NULL or empty, the first set that this processor can run.
 * Errors: NOT_FOUND if there is none, whose text goes to `why` and is not recorded. INVALID_ARGUMENT if no set has the
 * name `wanted`; UNSUPPORTED if this processor cannot run that set. */
sluice_status_t sluice_native_choose(const sluice_native_set_t* sets, int count, const char* wanted,
                                     const sluice_native_kernels_t** out_kernels, char* why, size_t why_bytes);
