// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/packed.h"

#include <math.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"

static const sluice_packed_format_t formats[SLUICE_PACKED_FORMATS] = {
    [SLUICE_PACKED_MXFP4] = {"mxfp4", 4, 1, 1, 32},
    [SLUICE_PACKED_FP8] = {"fp8", 8, 4, 128, 128},
    [SLUICE_PACKED_INT8] = {"int8", 8, 2, 1, 0},
    [SLUICE_PACKED_INT4] = {"int4", 4, 2, 1, 0},
};

const sluice_packed_format_t* sluice_packed_format(int32_t format) {
  return format > SLUICE_PACKED_NO && format < SLUICE_PACKED_FORMATS ? &formats[format] : NULL;
}

static float e2m1(uint8_t code) {
  static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return (code & 8) != 0 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

/* Read as the upper bits of an f16 magnitude, the seven lower bits of an e4m3 code are the number times 2^-8. */
static float e4m3(uint8_t code) {
  if ((code & 0x7f) == 0x7f) return NAN;
  return 256 * sluice_f16_to_f32((uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7));
}

float sluice_packed_code(int32_t format, uint8_t code) {
  switch (format) {
    case SLUICE_PACKED_MXFP4: return e2m1(code & 15);
    case SLUICE_PACKED_FP8: return e4m3(code);
    case SLUICE_PACKED_INT8: return (float)(int8_t)code;
    default: return (float)(int8_t)(((code & 15) ^ 8) - 8);
  }
}

/* 2^(code - 127). */
static float e8m0(uint8_t code) {
  if (code == 255) return NAN;
  const uint32_t bits = code == 0 ? (uint32_t)1 << 22 : (uint32_t)code << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return scale;
}

float sluice_packed_scale(int32_t format, const void* at) {
  switch (format) {
    case SLUICE_PACKED_MXFP4: return e8m0(*(const uint8_t*)at);
    case SLUICE_PACKED_FP8: {
      float scale;
      memcpy(&scale, at, sizeof scale);
      return scale;
    }
    default: {
      uint16_t scale;
      memcpy(&scale, at, sizeof scale);
      return sluice_bf16_to_f32(scale);
    }
  }
}

const char* sluice_packed_scales(const sluice_packed_t* packed, int64_t row) {
  const sluice_packed_format_t* format = &formats[packed->format];
  int64_t block = 0;
  if (packed->half > 0 && row >= packed->half) {
    block = sluice_packed_blocks(packed->half, format->block_rows);
    row -= packed->half;
  }
  block += row / format->block_rows;
  return (const char*)packed->scales + block * packed->scales_ld * format->scale_bytes;
}

static uint8_t code_at(const uint8_t* row, int32_t bits, int64_t col) {
  if (bits == 8) return row[col];
  return (col & 1) != 0 ? row[col / 2] >> 4 : row[col / 2] & 15;
}

static void write(void* out, int64_t at, int32_t dtype, float value) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: ((uint16_t*)out)[at] = sluice_f32_to_bf16(value); break;
    case SLUICE_DTYPE_F16: ((uint16_t*)out)[at] = sluice_f32_to_f16(value); break;
    case SLUICE_DTYPE_F64: ((double*)out)[at] = (double)value; break;
    default: ((float*)out)[at] = value; break;
  }
}

void sluice_packed_decode(const sluice_packed_t* packed, const void* data, int64_t ld, int64_t row, int64_t col,
                          int64_t count, int32_t dtype, void* out) {
  const sluice_packed_format_t* format = &formats[packed->format];
  const uint8_t* codes = (const uint8_t*)data + sluice_packed_bytes(format->bits, ld, row, 0);
  const char* scales = sluice_packed_scales(packed, row);
  for (int64_t done = 0; done < count;) {
    const int64_t block = (col + done) / packed->block_cols;
    const int64_t end = sluice_min((block + 1) * packed->block_cols - col, count);
    const float scale = sluice_packed_scale(packed->format, scales + block * format->scale_bytes);
    for (; done < end; ++done) {
      write(out, done, dtype, sluice_packed_code(packed->format, code_at(codes, format->bits, col + done)) * scale);
    }
  }
}

sluice_status_t sluice_packed_check_shape(int32_t format, int32_t block_cols, int64_t cols, const char* what) {
  const sluice_packed_format_t* f = sluice_packed_format(format);
  if (f == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "%s: weight format %d is unknown: mxfp4 (%d), fp8 (%d), int8 (%d) or "
                       "int4 (%d)",
                       what, format, SLUICE_PACKED_MXFP4, SLUICE_PACKED_FP8, SLUICE_PACKED_INT8, SLUICE_PACKED_INT4);
  }
  if (f->block_cols != 0 && block_cols != f->block_cols) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: blocks of %d columns, but those of %s have %d", what, block_cols,
                       f->name, f->block_cols);
  }
  if (block_cols < SLUICE_PACKED_LEAST_COLS || block_cols % SLUICE_PACKED_LEAST_COLS != 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: blocks of %d columns, expected a multiple of %d", what,
                       block_cols, SLUICE_PACKED_LEAST_COLS);
  }
  const int32_t whole = format == SLUICE_PACKED_MXFP4 ? block_cols : f->bits == 4 ? 2 : 1;
  if (cols % whole != 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "%s: a width of %lld, but %s needs a multiple of %d: keep this "
                       "weight in another format",
                       what, (long long)cols, f->name, whole);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_packed_check_values(const sluice_packed_t* packed, const void* data, int64_t ld, int64_t rows,
                                           int64_t cols, const char* what) {
  const sluice_packed_format_t* format = &formats[packed->format];
  for (int64_t row = 0; row < rows; ++row) {
    const char* scales = sluice_packed_scales(packed, row);
    for (int64_t col = 0; col < cols; col += packed->block_cols) {
      const float scale = sluice_packed_scale(packed->format, scales + col / packed->block_cols * format->scale_bytes);
      if (isfinite(scale)) continue;
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                         "%s: the %s scale of row %lld, columns %lld and up, is %s: make the checkpoint again", what,
                         format->name, (long long)row, (long long)col, isnan(scale) ? "NaN" : "infinite");
    }
    if (packed->format != SLUICE_PACKED_FP8) continue; /* no other format has a code for NaN */
    const uint8_t* codes = (const uint8_t*)data + row * ld;
    for (int64_t col = 0; col < cols; ++col) {
      if ((codes[col] & 0x7f) != 0x7f) continue;
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                         "%s: the fp8 code of row %lld, column %lld is 0x%02x, NaN: make the checkpoint again", what,
                         (long long)row, (long long)col, codes[col]);
    }
  }
  return SLUICE_OK;
}
