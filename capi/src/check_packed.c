/* Packed weights of a call: codes and scales have the shapes that the layer's config says (sluice/weights.h). */
#include <stdio.h>

#include "backend/base/tensor.h"
#include "capi/src/check_layer.h"

/* u8, and i8 where codes are signed whole numbers. */
static int is_bytes(const sluice_tensor_t* t, int32_t format) {
  if (t->type_lanes != 1 || t->type_bits != 8) return 0;
  return t->type_code == SLUICE_TYPE_UINT || (t->type_code == SLUICE_TYPE_INT && format == SLUICE_WEIGHTS_INT8);
}

/* Sizes, rows of contiguous elements that do not overlap, and data. */
static sluice_status_t check_rows(const sluice_tensor_t* t, const char* name, int64_t rows, int64_t cols) {
  if (t->device_type != SLUICE_DEVICE_CPU) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: device_type is %d, want %d (CPU): copy it to the host", name,
                       t->device_type, (int)SLUICE_DEVICE_CPU);
  }
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
  if ((cols > 1 && along != 1) || (rows > 1 && between < cols)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "%s: the strides are %lld, %lld; packed weights lie row by row: the second is 1, the first at "
                       "least %lld",
                       name, (long long)between, (long long)along, (long long)cols);
  }
  return SLUICE_OK;
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

sluice_status_t sluice_check_packed(const sluice_moe_t* moe, const sluice_tensor_t* codes,
                                    const sluice_tensor_t* scales, const char* name, const char* scales_name,
                                    const int64_t* shape) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const sluice_packed_format_t* format = sluice_packed_format(c->weight_format);
  const int32_t count = moe->shape.num_local;
  if (count > 0 && (codes == NULL || scales == NULL)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: %s is NULL; weights in %s need codes and scales (%d tensors)", c->layer_id,
                       codes == NULL ? name : scales_name, format->name, count);
  }
  for (int32_t e = 0; e < count; ++e) {
    char label[64];
    snprintf(label, sizeof label, "%s[%d]", name, e);
    if (!is_bytes(&codes[e], c->weight_format)) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: type code %u with %u bits; codes of %s are u8%s", label,
                         (unsigned)codes[e].type_code, (unsigned)codes[e].type_bits, format->name,
                         c->weight_format == SLUICE_WEIGHTS_INT8 ? " or i8" : "");
    }
    SLUICE_TRY(check_rows(&codes[e], label, shape[0], shape[1] * format->bits / 8));
    snprintf(label, sizeof label, "%s[%d]", scales_name, e);
    SLUICE_TRY(check_scales(&scales[e], label, c->weight_format));
    SLUICE_TRY(check_rows(&scales[e], label, sluice_packed_blocks(shape[0], format->block_rows),
                          sluice_packed_blocks(shape[1], c->weight_block)));
  }
  return SLUICE_OK;
}
