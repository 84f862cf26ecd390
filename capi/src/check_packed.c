// SPDX-License-Identifier: Apache-2.0
/* Checks packed weights of a config and of a call: codes and scales must have the shapes and bytes that
 * sluice/weights.h defines. */
#include <stdio.h>

#include "backend/base/dtype.h"
#include "backend/base/tensor.h"
#include "backend/moe/context/row_memory.h"
#include "capi/src/check_layer.h"

enum { DEFAULT_BLOCK = 128 };
#define MOST_WIDTH (1LL << 31) /* the bytes of a weight then fit 64 bits */

static sluice_status_t check_format(const char* where, int32_t format, int32_t block) {
  SLUICE_TRY(SLUICE_REQUIRE(format == SLUICE_WEIGHTS_PLAIN || sluice_packed_format(format) != NULL,
                            "%s: weight_format is %d; known are plain (0), mxfp4 (1), fp8 (2), int8 (3) and int4 (4)",
                            where, format));
  return SLUICE_REQUIRE(format != SLUICE_WEIGHTS_PLAIN || block == 0,
                        "%s: weight_block is %d, but weight_format is plain: set 0", where, block);
}

static int32_t block_of(int32_t format, int32_t block) {
  if (format == SLUICE_WEIGHTS_PLAIN || block != 0) return block;
  const sluice_packed_format_t* packed = sluice_packed_format(format);
  return packed->block_cols != 0 ? packed->block_cols : DEFAULT_BLOCK;
}

sluice_status_t sluice_check_weight_format(const char* where, int32_t format, int16_t* inout_block, int64_t model_width,
                                           int64_t hidden_width) {
  SLUICE_TRY(check_format(where, format, *inout_block));
  if (format == SLUICE_WEIGHTS_PLAIN) return SLUICE_OK;
  *inout_block = (int16_t)block_of(format, *inout_block);
  char what[64];
  snprintf(what, sizeof what, "%s: w1", where);
  SLUICE_TRY(sluice_packed_check_shape(format, *inout_block, model_width, what));
  snprintf(what, sizeof what, "%s: w2", where);
  return sluice_packed_check_shape(format, *inout_block, hidden_width, what);
}

sluice_status_t sluice_weights_bytes(int32_t format, int32_t block, int32_t dtype, int64_t num_out, int64_t num_in,
                                     uint64_t* out_codes, uint64_t* out_scales) {
  static const char where[] = "sluice_weights_bytes";
  SLUICE_TRY(SLUICE_REQUIRE(out_codes != NULL && out_scales != NULL, "%s: %s is NULL", where,
                            out_codes == NULL ? "out_codes" : "out_scales"));
  SLUICE_TRY(check_format(where, format, block));
  SLUICE_TRY(SLUICE_REQUIRE(num_out >= 0 && num_out <= MOST_WIDTH && num_in >= 1 && num_in <= MOST_WIDTH,
                            "%s: num_out is %lld and num_in %lld; they must be in [0, 2^31] and [1, 2^31]", where,
                            (long long)num_out, (long long)num_in));
  if (format == SLUICE_WEIGHTS_PLAIN) {
    SLUICE_TRY(SLUICE_REQUIRE(dtype >= SLUICE_DTYPE_F32 && dtype <= SLUICE_DTYPE_F16,
                              "%s: dtype is %s (%d); known are f32 (1), bf16 (2) and f16 (3)", where,
                              sluice_dtype_name(dtype), dtype));
    *out_codes = (uint64_t)num_out * (uint64_t)num_in * sluice_dtype_bytes(dtype), *out_scales = 0;
    return SLUICE_OK;
  }
  const sluice_packed_format_t* packed = sluice_packed_format(format);
  const int32_t cols = block_of(format, block);
  SLUICE_TRY(sluice_packed_check_shape(format, cols, num_in, where));
  *out_codes = (uint64_t)sluice_packed_bytes(packed->bits, num_in, num_out, 0);
  *out_scales = (uint64_t)(sluice_packed_blocks(num_out, packed->block_rows) * sluice_packed_blocks(num_in, cols) *
                           packed->scale_bytes);
  return SLUICE_OK;
}

/* Accepts u8, and i8 if codes are signed integers. */
static int is_bytes(const sluice_tensor_t* t, int32_t format) {
  if (t->type_lanes != 1 || t->type_bits != 8) return 0;
  return t->type_code == SLUICE_TYPE_UINT || (t->type_code == SLUICE_TYPE_INT && format == SLUICE_WEIGHTS_INT8);
}

/* Checks sizes, contiguous rows that do not overlap, and data in memory of the context's device. */
static sluice_status_t check_rows(const sluice_tensor_t* t, const char* name, const sluice_context_t* context,
                                  int64_t rows, int64_t cols) {
  const int is_cpu = context == NULL || context->device_type == SLUICE_DEVICE_CPU;
  SLUICE_TRY(SLUICE_REQUIRE(!is_cpu || t->device_type == SLUICE_DEVICE_CPU,
                            "%s: device_type is %d, want %d (CPU): copy it to the host", name, t->device_type,
                            (int)SLUICE_DEVICE_CPU));
  SLUICE_TRY(
      SLUICE_REQUIRE(is_cpu || (t->device_type == context->device_type && t->device_id == context->device_id),
                     "%s: device_type is %d and device_id %d, want %d and %d, as the layer's context has: copy it "
                     "there",
                     name, t->device_type, t->device_id, context->device_type, context->device_id));
  if (t->ndim != 2 || t->shape == NULL || t->data == NULL || t->shape[0] != rows || t->shape[1] != cols) {
    char found[64] = "no data or no shape";
    if (t->data != NULL && t->shape != NULL && t->ndim != 2) snprintf(found, sizeof found, "%d dimensions", t->ndim);
    if (t->data != NULL && t->shape != NULL && t->ndim == 2) {
      snprintf(found, sizeof found, "[%lld, %lld]", (long long)t->shape[0], (long long)t->shape[1]);
    }
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: has %s, want [%lld, %lld]", name, found, (long long)rows,
                       (long long)cols);
  }
  const int64_t along = sluice_tensor_stride(t, 1), between = sluice_tensor_stride(t, 0);
  return SLUICE_REQUIRE((cols <= 1 || along == 1) && (rows <= 1 || between >= cols),
                        "%s: the strides are %lld, %lld; packed weights lie row by row: the second is 1, the first at "
                        "least %lld",
                        name, (long long)between, (long long)along, (long long)cols);
}

static sluice_status_t check_scales(const sluice_tensor_t* t, const char* name, int32_t format) {
  const int is_u8 = t->type_lanes == 1 && t->type_code == SLUICE_TYPE_UINT && t->type_bits == 8;
  const int32_t dtype = sluice_tensor_dtype(t);
  const int fits = format == SLUICE_WEIGHTS_MXFP4 ? is_u8
                   : format == SLUICE_WEIGHTS_FP8 ? dtype == SLUICE_DTYPE_F32
                                                  : dtype == SLUICE_DTYPE_BF16;
  if (fits) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: type code %u with %u bits; scales of %s are %s", name,
                     (unsigned)t->type_code, (unsigned)t->type_bits, sluice_packed_format(format)->name,
                     format == SLUICE_WEIGHTS_MXFP4 ? "u8"
                     : format == SLUICE_WEIGHTS_FP8 ? "f32"
                                                    : "bf16");
}

sluice_status_t sluice_check_packed_weight(const sluice_tensor_t* codes, const sluice_tensor_t* scales,
                                           const char* name, const char* scales_name, const sluice_context_t* context,
                                           int32_t format, int32_t block, int64_t rows, int64_t cols) {
  const sluice_packed_format_t* f = sluice_packed_format(format);
  SLUICE_TRY(SLUICE_REQUIRE(is_bytes(codes, format), "%s: type code %u with %u bits; codes of %s are u8%s", name,
                            (unsigned)codes->type_code, (unsigned)codes->type_bits, f->name,
                            format == SLUICE_WEIGHTS_INT8 ? " or i8" : ""));
  SLUICE_TRY(check_rows(codes, name, context, rows, cols * f->bits / 8));
  SLUICE_TRY(check_scales(scales, scales_name, format));
  return check_rows(scales, scales_name, context, sluice_packed_blocks(rows, f->block_rows),
                    sluice_packed_blocks(cols, block));
}

/* As for other tensors, only the first of an array is looked up. A kernel reads a scale with one access. */
static sluice_status_t check_on_device(sluice_context_t* context, const sluice_tensor_t* codes,
                                       const sluice_tensor_t* scales, const sluice_packed_format_t* format,
                                       int is_looked_up, const char* name, const char* scales_name) {
  const uint64_t bytes = (uint64_t)format->scale_bytes;
  if (!context->rows->is_device) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE((uintptr_t)sluice_tensor_data(scales) % bytes == 0,
                            "%s: begins at %p; scales of %s begin at a multiple of %d bytes", scales_name,
                            sluice_tensor_data(scales), format->name, format->scale_bytes));
  if (!is_looked_up) return SLUICE_OK;
  SLUICE_TRY(sluice_rows_check(context->rows, context, sluice_tensor_data(codes), 1, 1, name));
  return sluice_rows_check(context->rows, context, sluice_tensor_data(scales), bytes, bytes, scales_name);
}

sluice_status_t sluice_check_packed(const sluice_moe_t* moe, const sluice_tensor_t* codes,
                                    const sluice_tensor_t* scales, const char* name, const char* scales_name,
                                    const int64_t* shape) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const sluice_packed_format_t* format = sluice_packed_format(c->weight_format);
  sluice_context_t* context = moe->context;
  const int32_t count = moe->shape.num_local;
  SLUICE_TRY(SLUICE_REQUIRE(count == 0 || (codes != NULL && scales != NULL),
                            "layer %d: %s is NULL; weights in %s need codes and scales (%d tensors)", c->layer_id,
                            codes == NULL ? name : scales_name, format->name, count));
  for (int32_t e = 0; e < count; ++e) {
    char label[64], scales_label[64];
    snprintf(label, sizeof label, "%s[%d]", name, e);
    snprintf(scales_label, sizeof scales_label, "%s[%d]", scales_name, e);
    SLUICE_TRY(sluice_check_packed_weight(&codes[e], &scales[e], label, scales_label, context, c->weight_format,
                                          c->weight_block, shape[0], shape[1]));
    SLUICE_TRY(check_on_device(context, &codes[e], &scales[e], format, e == 0, label, scales_label));
  }
  return SLUICE_OK;
}
