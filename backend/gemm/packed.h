// SPDX-License-Identifier: Apache-2.0
/* Weights in 4 or 8 bits, as the operand B of a GEMM.
 *
 * A packed weight is W [rows, cols], row after row, in codes of 4 or 8 bits, with scales that blocks of its elements
 * share. The columns are what a layer sums over in its forward. An element of the type that a GEMM computes in is
 *
 *   dtype(f32(code) * f32(scale))
 *
 * with one rounding of the product, and one more if the type is narrower than f32. transformers computes the same
 * values when it loads such a checkpoint. The functions here are the definition; "native" has its own decoder, which
 * returns the same bits. */
#pragma once

#include "backend/base/status.h"
#include "sluice/weights.h"

enum {
  SLUICE_PACKED_NO = SLUICE_WEIGHTS_PLAIN, /* elements of the GEMM's own type */
  SLUICE_PACKED_MXFP4 =
      SLUICE_WEIGHTS_MXFP4, /* OCP microscaling FP4: e2m1, blocks of 32 columns, scales 2^(u8 - 127), 255 is NaN */
  SLUICE_PACKED_FP8 = SLUICE_WEIGHTS_FP8,   /* e4m3 without infinities, blocks of 128 x 128, f32 scales */
  SLUICE_PACKED_INT8 = SLUICE_WEIGHTS_INT8, /* symmetric, blocks of some columns of a row, bf16 scales */
  SLUICE_PACKED_INT4 = SLUICE_WEIGHTS_INT4, /* the same in 4 bits, two's complement */
  SLUICE_PACKED_FORMATS = 5
};

/* The number of columns of a block is a multiple of this, so that all elements of a register share a scale. */
enum { SLUICE_PACKED_LEAST_COLS = 32 };

typedef struct sluice_packed_format_s {
  const char* name;
  int32_t bits; /* of a code; with 4 bits, an even column is the low half of a byte */
  int32_t scale_bytes;
  int32_t block_rows;
  int32_t block_cols; /* 0: as the layer says */
} sluice_packed_format_t;

/* Describes how B is packed; all zeros: B is not packed. */
typedef struct sluice_packed_s {
  int32_t format;
  int32_t block_cols;
  int32_t transposed; /* 1: B is the weight's transpose, as in a forward; 0: the weight itself */
  const void* scales; /* of the row where B begins: [block of rows][block of columns], without gaps in a row */
  int64_t scales_ld;  /* scales from one row of them to the next */
  int64_t half;       /* rows after which blocks of rows begin again (W3 after W1); 0: they do not */
} sluice_packed_t;

/* Returns NULL if there is no such format, or if it is SLUICE_PACKED_NO. */
const sluice_packed_format_t* sluice_packed_format(int32_t format);

/* The value of a code as f32; a code of 4 bits is in the low half. NaN for e4m3's 0x7f and 0xff. */
float sluice_packed_code(int32_t format, uint8_t code);

/* The scale at `at` as f32. */
float sluice_packed_scale(int32_t format, const void* at);

/* The first scale of row `row`. */
const char* sluice_packed_scales(const sluice_packed_t* packed, int64_t row);

/* Writes columns [col, col + count) of a row as `dtype`: f32, bf16, f16 or f64. ld: columns from one row to the next;
 * with 4 bits ld and col are even. */
void sluice_packed_decode(const sluice_packed_t* packed, const void* data, int64_t ld, int64_t row, int64_t col,
                          int64_t count, int32_t dtype, void* out);
typedef void (*sluice_packed_decode_fn_t)(const sluice_packed_t* packed, const void* data, int64_t ld, int64_t row,
                                          int64_t col, int64_t count, int32_t dtype, void* out);

/* Encodes W [rows, cols] of `dtype` (f32, bf16, f16, or f64, which is first rounded to f32) in the format of `packed`.
 * weight_ld and ld: elements of W, and columns of codes, from one row to the next. Writes the codes and the scales of
 * `packed`. Codes are rounded to nearest, ties to even. The scale of a block follows from its largest magnitude x:
 *   MXFP4  2^(floor(log2(x)) - 2); magnitudes above 6 scales become 6 scales [OCP MX 1.0, section 6.3]
 *   FP8    x / 448
 *   INT8   x / 127, INT4 x / 7, rounded to bf16; no code is -128 or -8
 * If W has NaN or infinity, returns INVALID_ARGUMENT with `what`, row and column, and writes nothing. */
sluice_status_t sluice_packed_encode(const sluice_packed_t* packed, const void* weight, int32_t dtype,
                                     int64_t weight_ld, int64_t rows, int64_t cols, void* codes, int64_t ld,
                                     const char* what);

/* Bytes from the beginning of a weight to element (row, col). */
static inline int64_t sluice_packed_bytes(int32_t bits, int64_t ld, int64_t row, int64_t col) {
  return (row * ld + col) * bits / 8;
}

/* Blocks that cover `size` rows or columns. */
static inline int64_t sluice_packed_blocks(int64_t size, int32_t block) { return (size + block - 1) / block; }

/* INVALID_ARGUMENT naming `what` unless a weight with `cols` columns can have this format and blocks of block_cols
 * columns. 4 bits need an even width, and MXFP4 whole blocks. A block has the size that the format fixes, or a multiple
 * of SLUICE_PACKED_LEAST_COLS. */
sluice_status_t sluice_packed_check_shape(int32_t format, int32_t block_cols, int64_t cols, const char* what);

/* INVALID_ARGUMENT naming `what`, row and column, if a code or scale of W [rows, cols] is NaN or infinite. */
sluice_status_t sluice_packed_check_values(const sluice_packed_t* packed, const void* data, int64_t ld, int64_t rows,
                                           int64_t cols, const char* what);
