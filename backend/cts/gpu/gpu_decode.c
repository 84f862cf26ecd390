// SPDX-License-Identifier: Apache-2.0
/* Weights decoded on the device have the bits that backend/gemm/packed.h defines. */
#include <stdio.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/cts/gpu/gpu_array.h"
#include "backend/cts/gpu/gpu_parts.h"
#include "backend/cts/gpu/gpu_rig.h"
#include "backend/gemm/packed.h"

/* WEIGHTS: more than one launch can take. HALF: the row at which W3 follows W1. */
enum { WEIGHTS = 67, ROWS = 21, HALF = 13, BLOCK = 96 };

static void fill_scales(int32_t format, void* scales, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float scale = 0.001F * (float)(1 + gpu_random_bits() % 1000);
    switch (format) {
      case SLUICE_WEIGHTS_MXFP4: ((uint8_t*)scales)[i] = (uint8_t)(gpu_random_bits() % 255); break;
      case SLUICE_WEIGHTS_FP8: ((float*)scales)[i] = scale; break;
      default: ((uint16_t*)scales)[i] = sluice_f32_to_bf16(scale);
    }
  }
}

static const char* decode(int32_t format, int32_t dtype, int64_t cols) {
  const sluice_packed_format_t* f = sluice_packed_format(format);
  const int32_t block_cols = f->block_cols != 0 ? f->block_cols : BLOCK;
  const int64_t across = sluice_packed_blocks(cols, block_cols), element = (int64_t)sluice_dtype_bytes(dtype);
  const int64_t down = sluice_packed_blocks(HALF, f->block_rows) + sluice_packed_blocks(ROWS - HALF, f->block_rows);
  const int64_t bytes = sluice_packed_bytes(f->bits, cols, ROWS, 0), room = sluice_round_up_u64((uint64_t)bytes, 16);
  const int64_t out_bytes = sluice_round_up_u64((uint64_t)(ROWS * cols * element), 16);
  gpu_array_t codes = gpu_array(WEIGHTS * room), scales = gpu_array(WEIGHTS * down * across * f->scale_bytes),
              out = gpu_zeros(WEIGHTS * out_bytes);
  sluice_cuda_packed_t weights[WEIGHTS];
  uint8_t* code = codes.host;
  for (int64_t i = 0; i < codes.bytes; ++i) {
    code[i] = (uint8_t)gpu_random_bits();
    if (format == SLUICE_WEIGHTS_FP8 && (code[i] & 127) == 127) code[i] ^= 1; /* not a number */
  }
  fill_scales(format, scales.host, WEIGHTS * down * across);
  gpu_send(&codes), gpu_send(&scales);
  for (int w = 0; w < WEIGHTS; ++w) {
    const int64_t first = w * down * across * f->scale_bytes;
    weights[w] = (sluice_cuda_packed_t){.codes = (char*)codes.there + w * room,
                                        .scales = (char*)scales.there + first,
                                        .out = (char*)out.there + w * out_bytes,
                                        .rows = ROWS,
                                        .row_bytes = cols * f->bits / 8,
                                        .scales_ld = across,
                                        .half = HALF};
    const sluice_packed_t packed = {format, block_cols, 0, (char*)scales.host + first, across, HALF};
    for (int64_t r = 0; r < ROWS; ++r) {
      sluice_packed_decode(&packed, code + w * room, cols, r, 0, cols, dtype,
                           (char*)out.host + w * out_bytes + r * cols * element);
    }
  }
  gpu_enter();
  const sluice_status_t status = sluice_cuda_decode(NULL, format, block_cols, cols, dtype, weights, WEIGHTS);
  gpu_leave();
  const char* problem = status == SLUICE_OK ? gpu_differs(&out, dtype, 0, 0) : last_message();
  gpu_drop(&codes), gpu_drop(&scales), gpu_drop(&out);
  return problem;
}

void gpu_decode(void) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  /* A width for lanes with eight columns each (one whole round and a part of one), and one for single columns. */
  static const int64_t widths[] = {1024 + 288, 34};
  char name[80];
  for (int32_t format = SLUICE_WEIGHTS_MXFP4; format <= SLUICE_WEIGHTS_INT4; ++format) {
    for (int d = 0; d < 4; ++d) {
      for (int w = 0; w < 2; ++w) {
        const int64_t cols = format == SLUICE_WEIGHTS_MXFP4 && w == 1 ? 32 : widths[w];
        const char* problem = decode(format, dtypes[d], cols);
        (void)snprintf(name, sizeof name, "%s decoded to %s, %lld columns", sluice_packed_format(format)->name,
                       sluice_dtype_name(dtypes[d]), (long long)cols);
        gpu_report(name, problem);
      }
    }
  }
}
