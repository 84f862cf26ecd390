// SPDX-License-Identifier: Apache-2.0
/* Codes and scales of a single weight, without a layer. */
#include "sluice/weights.h"

#include "backend/base/dtype.h"
#include "backend/base/tensor.h"
#include "capi/src/check_layer.h"

enum { DEFAULT_BLOCK = 128 };

typedef struct packed_weight_s {
  sluice_packed_t packed;
  int64_t rows, cols;
  void* codes;
  int64_t ld; /* distance of two rows of codes, in columns */
} packed_weight_t;

/* cols -1: taken from the codes. */
static sluice_status_t packed_weight_of(int32_t format, int32_t block, const sluice_tensor_t* codes,
                                        const sluice_tensor_t* scales, int64_t rows, int64_t cols,
                                        packed_weight_t* out) {
  const sluice_packed_format_t* f = sluice_packed_format(format);
  *out = (packed_weight_t){0};
  SLUICE_TRY(SLUICE_REQUIRE(codes != NULL && scales != NULL, "%s is NULL", codes == NULL ? "codes" : "scales"));
  if (f == NULL) return sluice_packed_check_shape(format, block, cols, "weight"); /* it names the formats */
  const int32_t block_cols = block != 0 ? block : f->block_cols != 0 ? f->block_cols : DEFAULT_BLOCK;
  if (cols < 0) {
    SLUICE_TRY(SLUICE_REQUIRE(codes->ndim == 2 && codes->shape != NULL, "codes: want a shape of two dimensions"));
    rows = codes->shape[0], cols = codes->shape[1] * 8 / f->bits;
  }
  SLUICE_TRY(sluice_packed_check_shape(format, block_cols, cols, "weight"));
  SLUICE_TRY(sluice_check_packed_weight(codes, scales, "codes", "scales", NULL, format, block_cols, rows, cols));
  const int64_t bytes = sluice_tensor_stride(codes, 0);
  *out = (packed_weight_t){
      .packed = {format, block_cols, 0, sluice_tensor_data(scales), sluice_tensor_stride(scales, 0), 0},
      .rows = rows,
      .cols = cols,
      .codes = sluice_tensor_data(codes),
      .ld = bytes * 8 / f->bits,
  };
  return SLUICE_OK;
}

static sluice_status_t check_weight(const sluice_tensor_t* weight, int32_t* out_dtype) {
  SLUICE_TRY(sluice_tensor_check(weight, "weight", 0, 2, NULL));
  *out_dtype = sluice_tensor_dtype(weight);
  SLUICE_TRY(SLUICE_REQUIRE(*out_dtype != SLUICE_DTYPE_I32 && *out_dtype != SLUICE_DTYPE_I64,
                            "weight: is %s, want f32, bf16, f16 or f64", sluice_dtype_name(*out_dtype)));
  return SLUICE_REQUIRE(weight->shape[1] <= 1 || sluice_tensor_stride(weight, 1) == 1,
                        "weight: the second stride is %lld, want 1", (long long)sluice_tensor_stride(weight, 1));
}

sluice_status_t sluice_weights_quantise(int32_t format, int32_t block, const sluice_tensor_t* weight,
                                        const sluice_tensor_t* codes, const sluice_tensor_t* scales) {
  int32_t dtype;
  packed_weight_t w;
  SLUICE_TRY(check_weight(weight, &dtype));
  SLUICE_TRY(packed_weight_of(format, block, codes, scales, weight->shape[0], weight->shape[1], &w));
  return sluice_packed_encode(&w.packed, sluice_tensor_data(weight), dtype, sluice_tensor_stride(weight, 0), w.rows,
                              w.cols, w.codes, w.ld, "weight");
}

sluice_status_t sluice_weights_dequantise(int32_t format, int32_t block, const sluice_tensor_t* codes,
                                          const sluice_tensor_t* scales, const sluice_tensor_t* weight) {
  int32_t dtype;
  packed_weight_t w;
  SLUICE_TRY(check_weight(weight, &dtype));
  SLUICE_TRY(sluice_tensor_check_written(weight, "weight"));
  SLUICE_TRY(packed_weight_of(format, block, codes, scales, weight->shape[0], weight->shape[1], &w));
  char* row = sluice_tensor_data(weight);
  const int64_t step = sluice_tensor_stride(weight, 0) * (int64_t)sluice_dtype_bytes(dtype);
  for (int64_t r = 0; r < w.rows; ++r) {
    sluice_packed_decode(&w.packed, w.codes, w.ld, r, 0, w.cols, dtype, row + r * step);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_weights_check(int32_t format, int32_t block, const sluice_tensor_t* codes,
                                     const sluice_tensor_t* scales) {
  packed_weight_t w;
  SLUICE_TRY(packed_weight_of(format, block, codes, scales, -1, -1, &w));
  return sluice_packed_check_values(&w.packed, w.codes, w.ld, w.rows, w.cols, "weight");
}
