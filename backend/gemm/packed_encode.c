// SPDX-License-Identifier: Apache-2.0
/* Encodes a weight: makes the codes and scales that packed.c decodes. */
#include <math.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/gemm/packed.h"

static float element(const void* weight, int32_t dtype, int64_t at) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return sluice_bf16_to_f32(((const uint16_t*)weight)[at]);
    case SLUICE_DTYPE_F16: return sluice_f16_to_f32(((const uint16_t*)weight)[at]);
    case SLUICE_DTYPE_F64: return (float)((const double*)weight)[at];
    default: return ((const float*)weight)[at];
  }
}

static int32_t bits_of(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* 2^exponent, exact also for the subnormal number 2^-127. */
static float power_of_two(int32_t exponent) {
  const int32_t bits = exponent < -126 ? 1 << 22 : (exponent + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

/* Rounds to the nearest whole number, ties to even; |x| < 2^22. */
static float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

/* The code of a small float with a sign, an exponent with this bias and `fraction_bits` of fraction. Magnitudes above
 * `largest` become `largest`. */
static uint8_t small_float(float value, int32_t fraction_bits, int32_t bias, float largest, uint8_t sign) {
  const float magnitude = fminf(fabsf(value), largest);
  const int32_t own = (bits_of(magnitude) >> 23) - 127;
  const int32_t exponent = own < 1 - bias ? 1 - bias : own; /* all subnormal codes have the same exponent */
  const int32_t one = 1 << fraction_bits;
  const int32_t steps = (int32_t)nearest(magnitude * power_of_two(fraction_bits - exponent));
  /* Steps below `one` are subnormal; steps of 2 * one carry into the exponent. */
  const int32_t code = steps < one ? steps : ((exponent + bias) << fraction_bits) + steps - one;
  return (uint8_t)(code | (bits_of(value) < 0 ? sign : 0));
}

static uint8_t encode(int32_t format, float value, float scale) {
  if (scale == 0) return 0;
  const float x = value / scale;
  switch (format) {
    case SLUICE_PACKED_MXFP4: return small_float(x, 1, 1, 6, 8);
    case SLUICE_PACKED_FP8: return small_float(x, 3, 7, 448, 128);
    case SLUICE_PACKED_INT8: return (uint8_t)(int8_t)nearest(fmaxf(-127, fminf(x, 127)));
    default: return (uint8_t)((int8_t)nearest(fmaxf(-7, fminf(x, 7))) & 15);
  }
}

/* Writes the scale of a block whose largest magnitude this is. */
static void write_scale(int32_t format, float largest, void* at) {
  if (format == SLUICE_PACKED_MXFP4) {
    const int32_t exponent = (bits_of(largest) >> 23) - 127 - 2;
    *(uint8_t*)at = (uint8_t)(exponent < -127 ? 0 : exponent + 127);
    return;
  }
  if (format == SLUICE_PACKED_FP8) {
    const float scale = largest / 448;
    memcpy(at, &scale, sizeof scale);
    return;
  }
  const uint16_t scale = sluice_f32_to_bf16(largest / (format == SLUICE_PACKED_INT8 ? 127 : 7));
  memcpy(at, &scale, sizeof scale);
}

typedef struct weight_s {
  const void* data;
  int32_t dtype;
  int64_t ld;
} weight_t;

static float largest_of(const weight_t* w, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  float largest = 0;
  for (int64_t r = row; r < rows; ++r) {
    for (int64_t c = col; c < cols; ++c) largest = fmaxf(largest, fabsf(element(w->data, w->dtype, r * w->ld + c)));
  }
  return largest;
}

static void encode_row(const sluice_packed_t* packed, const weight_t* w, int64_t row, int64_t cols, uint8_t* codes) {
  const sluice_packed_format_t* format = sluice_packed_format(packed->format);
  const char* scales = sluice_packed_scales(packed, row);
  float scale = 0;
  for (int64_t c = 0; c < cols; ++c) {
    if (c % packed->block_cols == 0) {
      scale = sluice_packed_scale(packed->format, scales + c / packed->block_cols * format->scale_bytes);
    }
    const uint8_t code = encode(packed->format, element(w->data, w->dtype, row * w->ld + c), scale);
    if (format->bits == 8) {
      codes[c] = code;
    } else if (c % 2 == 0) {
      codes[c / 2] = code;
    } else {
      codes[c / 2] |= (uint8_t)(code << 4);
    }
  }
}

sluice_status_t sluice_packed_encode(const sluice_packed_t* packed, const void* weight, int32_t dtype,
                                     int64_t weight_ld, int64_t rows, int64_t cols, void* codes, int64_t ld,
                                     const char* what) {
  const sluice_packed_format_t* format = sluice_packed_format(packed->format);
  const weight_t w = {weight, dtype, weight_ld};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const float value = element(weight, dtype, r * weight_ld + c);
      if (isfinite(value)) continue;
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: row %lld, column %lld is %g, which %s cannot represent", what,
                         (long long)r, (long long)c, (double)value, format->name);
    }
  }
  for (int64_t r = 0; r < rows; r += format->block_rows) {
    char* scales = (char*)sluice_packed_scales(packed, r);
    for (int64_t c = 0; c < cols; c += packed->block_cols) {
      const float largest =
          largest_of(&w, r, sluice_min(rows, r + format->block_rows), c, sluice_min(cols, c + packed->block_cols));
      write_scale(packed->format, largest, scales + c / packed->block_cols * format->scale_bytes);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    encode_row(packed, &w, r, cols, (uint8_t*)codes + sluice_packed_bytes(format->bits, ld, r, 0));
  }
  return SLUICE_OK;
}
