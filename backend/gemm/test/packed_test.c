// SPDX-License-Identifier: Apache-2.0
/* Packed weights without a GEMM: each code of each format against an independent formula, and refusals. */
#include "backend/gemm/packed.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/test/refused.h"

/* The value of a small float from its sign, exponent and fraction, as its standard defines. */
static double small_float(int code, int exponent_bits, int fraction_bits, int bias) {
  const int fraction = code & ((1 << fraction_bits) - 1);
  const int exponent = code >> fraction_bits & ((1 << exponent_bits) - 1);
  const double sign = code >> (fraction_bits + exponent_bits) & 1 ? -1 : 1;
  const double one = 1 << fraction_bits;
  if (exponent == 0) return sign * ldexp(fraction / one, 1 - bias);
  return sign * ldexp(1 + fraction / one, exponent - bias);
}

static double wanted_code(int32_t format, int code) {
  switch (format) {
    case SLUICE_PACKED_MXFP4: return small_float(code, 2, 1, 1);
    case SLUICE_PACKED_FP8: return (code & 127) == 127 ? (double)NAN : small_float(code, 4, 3, 7);
    case SLUICE_PACKED_INT8: return code < 128 ? code : code - 256;
    default: return code < 8 ? code : code - 16;
  }
}

TEST(Packed_EveryCode_IsItsNumber) {
  for (int32_t format = 1; format < SLUICE_PACKED_FORMATS; ++format) {
    for (int code = 0; code < 1 << sluice_packed_format(format)->bits; ++code) {
      const double found = (double)sluice_packed_code(format, (uint8_t)code), wanted = wanted_code(format, code);
      if (found != wanted && !isnan(wanted)) fail_msg("format %d, code %d: %g, not %g", format, code, found, wanted);
      assert_int_equal(isnan(found), isnan(wanted));
      assert_int_equal(signbit(found), signbit(wanted));
    }
  }
}

TEST(Packed_EveryScale_IsItsNumber) {
  for (int code = 0; code < 255; ++code) {
    const uint8_t at = (uint8_t)code;
    assert_true((double)sluice_packed_scale(SLUICE_PACKED_MXFP4, &at) == ldexp(1, code - 127));
  }
  const uint8_t nan = 255;
  assert_true(isnan(sluice_packed_scale(SLUICE_PACKED_MXFP4, &nan)));
  /* Not aligned, as scales in a checkpoint may be. */
  char bytes[8];
  const float f32 = 0.3f;
  memcpy(bytes + 1, &f32, sizeof f32);
  assert_true(sluice_packed_scale(SLUICE_PACKED_FP8, bytes + 1) == f32);
  const uint16_t bf16 = 0x3e9a;
  memcpy(bytes + 1, &bf16, sizeof bf16);
  assert_true(sluice_packed_scale(SLUICE_PACKED_INT8, bytes + 1) == 0x1.34p-2f);
}

/* MXFP4 is exact in bf16 for every scale with finite values. Other products are rounded once to f32, once to bf16. */
TEST(Packed_Products_RoundedOnceToF32AndOnceToBf16) {
  for (int scale = 0; scale < 253; ++scale) {
    uint8_t codes[16] = {0};
    uint16_t out[32];
    const uint8_t at = (uint8_t)scale;
    for (int i = 0; i < 8; ++i) codes[i] = (uint8_t)(2 * i | (2 * i + 1) << 4);
    const sluice_packed_t packed = {SLUICE_PACKED_MXFP4, 32, 0, &at, 1, 0};
    sluice_packed_decode(&packed, codes, 32, 0, 0, 32, SLUICE_DTYPE_BF16, out);
    for (int i = 0; i < 16; ++i) {
      const double wanted = wanted_code(SLUICE_PACKED_MXFP4, i) * ldexp(1, scale - 127);
      if ((double)sluice_bf16_to_f32(out[i]) != wanted) fail_msg("scale %d, code %d", scale, i);
    }
  }
  const float scale = 0.0123f;
  const sluice_packed_t packed = {SLUICE_PACKED_FP8, 128, 0, &scale, 1, 0};
  for (int code = 0; code < 256; ++code) {
    const uint8_t at = (uint8_t)code;
    uint16_t bf16;
    float f32;
    double f64;
    sluice_packed_decode(&packed, &at, 1, 0, 0, 1, SLUICE_DTYPE_BF16, &bf16);
    sluice_packed_decode(&packed, &at, 1, 0, 0, 1, SLUICE_DTYPE_F32, &f32);
    sluice_packed_decode(&packed, &at, 1, 0, 0, 1, SLUICE_DTYPE_F64, &f64);
    const float wanted = (float)(wanted_code(SLUICE_PACKED_FP8, code) * (double)scale);
    if (isnan(wanted)) {
      assert_true(isnan(sluice_bf16_to_f32(bf16)) && isnan(f32) && isnan(f64));
      continue;
    }
    assert_true(f32 == wanted && f64 == (double)wanted);
    assert_int_equal(bf16, sluice_f32_to_bf16(wanted));
  }
}

TEST(Packed_ShapesThatDoNotFit_RefusedByName) {
  assert_int_equal(sluice_packed_check_shape(SLUICE_PACKED_MXFP4, 32, 96, "w"), SLUICE_OK);
  assert_int_equal(sluice_packed_check_shape(SLUICE_PACKED_FP8, 128, 97, "w"), SLUICE_OK);
  assert_int_equal(sluice_packed_check_shape(SLUICE_PACKED_INT8, 96, 97, "w"), SLUICE_OK);
  assert_int_equal(sluice_packed_check_shape(SLUICE_PACKED_INT4, 64, 98, "w"), SLUICE_OK);
  REFUSED(sluice_packed_check_shape(9, 32, 96, "w7"), SLUICE_E_INVALID_ARGUMENT, "w7: weight format 9 is unknown");
  REFUSED(sluice_packed_check_shape(SLUICE_PACKED_MXFP4, 32, 80, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "w7: a width of 80, but mxfp4 needs a multiple");
  REFUSED(sluice_packed_check_shape(SLUICE_PACKED_MXFP4, 16, 96, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "blocks of 16 columns, but those of mxfp4");
  REFUSED(sluice_packed_check_shape(SLUICE_PACKED_FP8, 96, 192, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "blocks of 96 columns, but those of fp8 have 128");
  REFUSED(sluice_packed_check_shape(SLUICE_PACKED_INT4, 32, 97, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "a width of 97, but int4 needs a multiple of 2");
  REFUSED(sluice_packed_check_shape(SLUICE_PACKED_INT8, 48, 96, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "blocks of 48 columns, expected a multiple of 32");
  REFUSED(sluice_packed_check_shape(SLUICE_PACKED_INT8, 0, 96, "w7"), SLUICE_E_INVALID_ARGUMENT, "blocks of 0 columns");
}

TEST(Packed_CodesAndScalesOfNoNumber_RefusedByPlace) {
  uint8_t codes[200 * 130] = {0};
  float scales[2 * 2] = {1, 1, 1, 1};
  const sluice_packed_t fp8 = {SLUICE_PACKED_FP8, 128, 0, scales, 2, 0};
  assert_int_equal(sluice_packed_check_values(&fp8, codes, 130, 200, 130, "w7"), SLUICE_OK);
  codes[150 * 130 + 129] = 0xff;
  REFUSED(sluice_packed_check_values(&fp8, codes, 130, 200, 130, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "w7: the fp8 code of row 150, column 129 is 0xff");
  codes[150 * 130 + 129] = 0x7e;
  scales[3] = INFINITY;
  REFUSED(sluice_packed_check_values(&fp8, codes, 130, 200, 130, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "w7: the fp8 scale of row 128, columns 128");
  uint8_t powers[3 * 2] = {0, 254, 3, 255, 4, 5};
  const sluice_packed_t mxfp4 = {SLUICE_PACKED_MXFP4, 32, 0, powers, 2, 0};
  REFUSED(sluice_packed_check_values(&mxfp4, codes, 64, 3, 64, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "w7: the mxfp4 scale of row 1, columns 32");
  powers[3] = 254;
  assert_int_equal(sluice_packed_check_values(&mxfp4, codes, 64, 3, 64, "w7"), SLUICE_OK);
  uint16_t halves[2] = {0x3f80, 0x7fc0};
  const sluice_packed_t int8 = {SLUICE_PACKED_INT8, 32, 0, halves, 2, 0};
  REFUSED(sluice_packed_check_values(&int8, codes, 64, 1, 64, "w7"), SLUICE_E_INVALID_ARGUMENT,
          "int8 scale of row 0, columns 32 and up, is NaN");
}

/* Returns the code of the value nearest to x, for ties the even code, by trying all codes. */
static int nearest_code(int32_t format, double x) {
  const int codes = 1 << sluice_packed_format(format)->bits;
  int best = -1;
  double least = INFINITY;
  for (int code = 0; code < codes; ++code) {
    if ((format == SLUICE_PACKED_INT8 && code == 128) || (format == SLUICE_PACKED_INT4 && code == 8)) continue;
    const double distance = fabs(wanted_code(format, code) - x);
    const int has_minus_0 = format == SLUICE_PACKED_MXFP4 || format == SLUICE_PACKED_FP8;
    if (isnan(distance) || (has_minus_0 && signbit(wanted_code(format, code)) != signbit(x))) continue;
    if (distance < least || (distance == least && code % 2 == 0)) best = code, least = distance;
  }
  return best;
}

enum { ENCODE_ROWS = 130, ENCODE_COLS = 192 };

static int code_of(int32_t format, const uint8_t* codes, int64_t at) {
  if (sluice_packed_format(format)->bits == 8) return codes[at];
  return codes[at / 2] >> (at % 2 * 4) & 15;
}

TEST(Packed_EncodedNumbers_AreTheNearestOfTheirBlock) {
  static float weight[ENCODE_ROWS * ENCODE_COLS], back[ENCODE_COLS];
  static uint8_t codes[ENCODE_ROWS * ENCODE_COLS], scales[ENCODE_ROWS * ENCODE_COLS];
  uint32_t seed = 1;
  for (int i = 0; i < ENCODE_ROWS * ENCODE_COLS; ++i) {
    seed = seed * 1664525u + 1013904223u;
    const double size = ldexp((double)(seed >> 8) / (1 << 24), -(int)(seed % 23));
    weight[i] = (float)(i % 5 == 0 ? -size : i % 7 == 0 ? floor(size * 64) / 32 : size); /* some are ties */
    if (i / ENCODE_COLS == 3) weight[i] = 0;
  }
  for (int32_t format = 1; format < SLUICE_PACKED_FORMATS; ++format) {
    const sluice_packed_format_t* f = sluice_packed_format(format);
    const int32_t block = f->block_cols == 0 ? 64 : f->block_cols;
    const sluice_packed_t packed = {format, block, 0, scales, sluice_packed_blocks(ENCODE_COLS, block), 0};
    assert_int_equal(sluice_packed_encode(&packed, weight, SLUICE_DTYPE_F32, ENCODE_COLS, ENCODE_ROWS, ENCODE_COLS,
                                          codes, ENCODE_COLS, "w"),
                     SLUICE_OK);
    for (int64_t r = 0; r < ENCODE_ROWS; ++r) {
      sluice_packed_decode(&packed, codes, ENCODE_COLS, r, 0, ENCODE_COLS, SLUICE_DTYPE_F32, back);
      for (int64_t c = 0; c < ENCODE_COLS; ++c) {
        const float x = weight[r * ENCODE_COLS + c];
        const float scale = sluice_packed_scale(format, sluice_packed_scales(&packed, r) + c / block * f->scale_bytes);
        const int code = code_of(format, codes, r * ENCODE_COLS + c);
        if (r == 3 && f->block_rows == 1) {
          assert_true(back[c] == 0);
          continue;
        }
        const double found = wanted_code(format, code), wanted = wanted_code(format, nearest_code(format, x / scale));
        if (found != wanted) fail_msg("%s: %g of scale %g is %g, not %g", f->name, x, scale, found, wanted);
      }
    }
  }
}

TEST(Packed_DecodedMxfp4Encoded_IsTheSame) {
  enum { SCALES = 245 };
  float row[64], again[64];
  for (int scale = 5; scale < SCALES; ++scale) {
    for (int most = 1; most < 8; ++most) { /* the largest code of the block */
      uint8_t codes[32], scales[2] = {(uint8_t)scale, (uint8_t)scale};
      for (int i = 0; i < 32; ++i) codes[i] = (uint8_t)(i % (most + 1) | (i * 5 % (most + 1)) << 4 | (i & 1) << 3);
      const sluice_packed_t packed = {SLUICE_PACKED_MXFP4, 32, 0, scales, 2, 0};
      sluice_packed_decode(&packed, codes, 64, 0, 0, 64, SLUICE_DTYPE_F32, row);
      assert_int_equal(sluice_packed_encode(&packed, row, SLUICE_DTYPE_F32, 64, 1, 64, codes, 64, "w"), SLUICE_OK);
      sluice_packed_decode(&packed, codes, 64, 0, 0, 64, SLUICE_DTYPE_F32, again);
      if (memcmp(row, again, sizeof row) != 0) fail_msg("scale %d, codes up to %d", scale, most);
    }
  }
}

TEST(Packed_NoNumberEncoded_RefusedByPlace) {
  float weight[2 * 64] = {0};
  uint8_t codes[2 * 64], scales[4];
  memset(codes, 7, sizeof codes);
  const sluice_packed_t packed = {SLUICE_PACKED_MXFP4, 32, 0, scales, 2, 0};
  weight[64 + 33] = -INFINITY;
  REFUSED(sluice_packed_encode(&packed, weight, SLUICE_DTYPE_F32, 64, 2, 64, codes, 64, "w7"),
          SLUICE_E_INVALID_ARGUMENT, "w7: row 1, column 33 is -inf, which mxfp4 cannot represent");
  for (int i = 0; i < 128; ++i) assert_int_equal(codes[i], 7);
}
