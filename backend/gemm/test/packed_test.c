/* Packed weights by themselves: each code of each format against a formula of its own, where the scales of an element
 * lie, and what is refused. */
#include "backend/gemm/packed.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/test/refused.h"

/* Sign, exponent and fraction of a small float, as its standard puts them together. */
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
      const double wanted = wanted_code(format, code);
      const float got = sluice_packed_code(format, (uint8_t)code);
      if (isnan(wanted) ? !isnan(got) : (double)got != wanted || !signbit(got) != !signbit(wanted)) {
        fail_msg("%s: code 0x%02x is %g, expected %g", sluice_packed_format(format)->name, code, (double)got, wanted);
      }
    }
  }
  assert_null(sluice_packed_format(SLUICE_PACKED_NO));
  assert_null(sluice_packed_format(SLUICE_PACKED_FORMATS));
  assert_null(sluice_packed_format(-1));
}

TEST(Packed_EveryScale_IsItsNumber) {
  for (int code = 0; code < 255; ++code) {
    const uint8_t at = (uint8_t)code;
    assert_true((double)sluice_packed_scale(SLUICE_PACKED_MXFP4, &at) == ldexp(1, code - 127));
  }
  const uint8_t nan = 255;
  assert_true(isnan(sluice_packed_scale(SLUICE_PACKED_MXFP4, &nan)));
  /* Stored as a checkpoint may store them: at no multiple of their size. */
  char bytes[8];
  const float f32 = 0.3f;
  memcpy(bytes + 1, &f32, sizeof f32);
  assert_true(sluice_packed_scale(SLUICE_PACKED_FP8, bytes + 1) == f32);
  const uint16_t bf16 = 0x3e9a;
  memcpy(bytes + 1, &bf16, sizeof bf16);
  assert_true(sluice_packed_scale(SLUICE_PACKED_INT8, bytes + 1) == 0x1.34p-2f);
}

/* MXFP4 is exact in bf16 for every scale that leaves its numbers finite; the product of the others is rounded once to
 * f32 and once to bf16. */
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

/* Every element of [300, 270] has the number of its own block; after `half` rows blocks begin again. */
TEST(Packed_EveryElement_HasTheScaleOfItsBlock) {
  enum { ROWS = 300, COLS = 270, HALF = 150 };
  static uint8_t codes[ROWS * COLS];
  memset(codes, 0x38, sizeof codes); /* 1 */
  for (int half = 0; half < 2; ++half) {
    const int64_t blocks = half ? 2 * 2 : 3, across = 3, ld = 5;
    float scales[4 * 5];
    for (int64_t i = 0; i < blocks * ld; ++i) scales[i] = (float)i;
    const sluice_packed_t packed = {SLUICE_PACKED_FP8, 128, 0, scales, ld, half ? HALF : 0};
    for (int64_t r = 0; r < ROWS; ++r) {
      float out[COLS];
      const int64_t from = r % 7 * 2;
      sluice_packed_decode(&packed, codes, COLS, r, from, COLS - from, SLUICE_DTYPE_F32, out);
      int64_t block = r / 128;
      if (half) block = r < HALF ? r / 128 : 2 + (r - HALF) / 128;
      for (int64_t c = from; c < COLS; ++c) {
        if (out[c - from] == (float)(block * ld + c / 128)) continue;
        fail_msg("element (%d, %d) has scale %g", (int)r, (int)c, (double)out[c - from]);
      }
    }
    assert_true(across * 128 >= COLS);
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
