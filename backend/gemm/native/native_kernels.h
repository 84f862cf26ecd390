// SPDX-License-Identifier: Apache-2.0
/* What the driver of "native" needs of an instruction set: one table of kernels, compiled for it and chosen at run
 * time. All of them give the same bits, but for GEMMs of bf16 where there is a sluice_native_bf16_t, or kernels that
 * multiply pairs. Internal to backend/gemm/native. */
#ifndef SLUICE_BACKEND_GEMM_NATIVE_NATIVE_KERNELS_H_
#define SLUICE_BACKEND_GEMM_NATIVE_NATIVE_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

#include "backend/gemm/gemm_form.h"
#include "backend/gemm/native/native_prefetch.h"
#include "sluice/base.h"

/* Steps of k in a step of a tile's prefetch, which asks for the operand that is packed next. */
enum { SLUICE_NATIVE_STEP = 8 };

/* Of a packed weight, so many rows of so many columns are decoded to the stack, and packed from there. */
enum { SLUICE_NATIVE_ROWS = 16, SLUICE_NATIVE_COLS = 256 };

/* One tile: out[i][j] = start[i][j] + sum over k, ascending, of a[k][i] * b[k][j], each step one fused multiply-add.
 * The sum of an element is that one chain whatever the tile's height, its place, or the block of k it is cut at.
 * Where kernels take pairs, each float of a and b holds two bf16, of an even k and of the odd one after it. */
typedef struct sluice_native_tile_s {
  int64_t depth;     /* steps: of one k, or of a pair of them */
  const float* a;    /* [depth][rows] */
  float* b;          /* [depth][width] */
  const float* raw;  /* NULL, or B itself, [depth][cols]: the tile reads it and leaves it packed in b */
  int64_t raw_ld;    /* elements */
  const void* start; /* NULL: zeros */
  void* out;
  int64_t start_ld, out_ld; /* elements */
  int32_t start_dtype, out_dtype;
  int32_t rows, cols;     /* rows in [1, max_rows], cols in [1, width] */
  const char* next_out;   /* rows to be written next, or NULL */
  int64_t next_out_bytes; /* from one of them to the next */
  int32_t next_each;      /* of them that are asked for per SLUICE_NATIVE_STEP steps of k, at least 1 */
} sluice_native_tile_t;

/* GEMMs of bf16 that a set computes its own way, not by tiles of f32. */
typedef struct sluice_native_bf16_s {
  int32_t width; /* threads share a GEMM by whole panels of so many columns of C */
  /* Floats of workspace for a GEMM: a multiple of a line. m, n and k are positive, here and below. */
  int64_t (*room)(const sluice_gemm_form_t* form);
  void (*begin)(void); /* on each thread, before its GEMMs, */
  void (*end)(void);   /* and after them */
  /* Columns [from, to) of a GEMM. next: the one of which this thread begins column next_from after it, or NULL. */
  void (*problem)(const sluice_gemm_form_t* form, int32_t dtype_c, float beta, int64_t from, int64_t to, float* room,
                  const sluice_gemm_form_t* next, int64_t next_from);
} sluice_native_bf16_t;

/* GEMMs of few rows that a set computes without packing B, to the same bits. */
typedef struct sluice_native_thin_s {
  int (*takes)(const sluice_gemm_form_t* form, int32_t dtype_c);
  /* Floats of workspace for one that it takes: a multiple of a line. */
  int64_t (*room)(const sluice_gemm_form_t* form);
  /* As sluice_native_bf16_t's; of any dtype. */
  void (*problem)(const sluice_gemm_form_t* form, int32_t dtype_ab, int32_t dtype_c, float beta, int64_t from,
                  int64_t to, float* room, const sluice_gemm_form_t* next, int64_t next_from);
} sluice_native_thin_t;

typedef struct sluice_native_kernels_s {
  const char* name;
  int32_t max_rows; /* of a tile */
  int32_t width;    /* of a tile */
  int32_t unit;     /* k in a step of a tile, and in a packed float: 1, or 2 that are bf16 */
  /* Reads `width` (a: `rows`) floats per step of k, whatever `cols` is (raw: `cols`); writes only what is in the tile,
   * and b where there is raw. */
  void (*tile)(const sluice_native_tile_t* tile, sluice_native_prefetch_t* prefetch);
  /* out[k][i] = in[i][k], f32, for i < count <= 16 and k < depth; row k of out begins at k * out_ld. Where out_ld is at
   * least 16, the lanes past `count` become zeros; else out_ld is count, at most max_rows, and up to lane 15 may be
   * written past the last row. With pairs row s holds in[i][2 s] and in[i][2 s + 1], zero where that is past depth. */
  void (*pack_rows)(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                    int64_t out_ld);
  /* out[k][i] = in[k][i], f32; otherwise as pack_rows. */
  void (*pack_columns)(const void* in, int64_t in_ld, int32_t dtype, int64_t count, int64_t depth, float* out,
                       int64_t out_ld);
  /* sluice_packed_decode of at most SLUICE_NATIVE_COLS columns that begin with a multiple of 16, to f32, bf16 or f16,
   * to the same bits. Up to 15 elements past `count` may be written. */
  sluice_packed_decode_fn_t decode;
  /* NULL: through `decode`. Else as pack_rows, of rows [row, row + count) of a B that is packed along k, from k0 on,
   * which is a multiple of SLUICE_PACKED_LEAST_COLS. out_ld is at least 16; lanes past `count` may have any values. */
  void (*pack_codes_along)(const sluice_gemm_form_t* form, int32_t dtype, int64_t row, int64_t count, int64_t k0,
                           int64_t depth, float* out, int64_t out_ld);
  /* B [k0 ..][j0 ..] that is packed row by row as panels of [depth][width], with zeros after the last column. j0 is a
   * multiple of `width`. */
  void (*pack_codes_across)(const sluice_gemm_form_t* form, int32_t dtype, int64_t k0, int64_t depth, int64_t j0,
                            int64_t cols, float* out);
  const sluice_native_bf16_t* bf16;            /* NULL: as the other dtypes */
  const sluice_native_thin_t* thin;            /* NULL: as GEMMs of many rows */
  const struct sluice_native_kernels_s* pairs; /* what GEMMs of bf16 go by instead of this table, or NULL */
} sluice_native_kernels_t;

/* NULL where this processor lacks AMX (TILE, BF16), AVX512-BF16 or AVX-512, or where the kernel does not let this
 * process use AMX. */
const sluice_native_kernels_t* sluice_native_amx(void);
/* NULL where it lacks AVX512-BF16 or AVX-512. */
const sluice_native_kernels_t* sluice_native_avx512_bf16(void);
/* NULL where this processor lacks AVX-512 (F, BW, DQ, VL). */
const sluice_native_kernels_t* sluice_native_avx512(void);
/* NULL where it lacks AVX2, FMA or F16C. */
const sluice_native_kernels_t* sluice_native_avx2(void);

typedef struct sluice_native_set_s {
  const char* name;                       /* as SLUICE_NATIVE says it */
  const char* needs;                      /* as a message says it */
  const sluice_native_kernels_t* kernels; /* NULL: not on this processor */
} sluice_native_set_t;

enum { SLUICE_NATIVE_SETS = 4 };

/* All sets, the widest first; returns how many. */
int sluice_native_sets(sluice_native_set_t out_sets[SLUICE_NATIVE_SETS]);

/* The first set that is there, or the one that `wanted` (NULL or empty: none) names.
 * Errors: NOT_FOUND where no set is there, not recorded: the text goes to `why`. INVALID_ARGUMENT: `wanted` is no name.
 * UNSUPPORTED: its set is not there. */
sluice_status_t sluice_native_choose(const sluice_native_set_t* sets, int count, const char* wanted,
                                     const sluice_native_kernels_t** out_kernels, char* why, size_t why_bytes);

#endif /* SLUICE_BACKEND_GEMM_NATIVE_NATIVE_KERNELS_H_ */
