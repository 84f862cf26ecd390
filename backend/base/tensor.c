// SPDX-License-Identifier: Apache-2.0
#include "backend/base/tensor.h"

#include "backend/base/dtype.h"

int32_t sluice_tensor_dtype(const sluice_tensor_t* tensor) {
  if (tensor == NULL || tensor->type_lanes != 1) return 0;
  switch (tensor->type_code) {
    case SLUICE_TYPE_FLOAT:
      if (tensor->type_bits == 32) return SLUICE_DTYPE_F32;
      if (tensor->type_bits == 16) return SLUICE_DTYPE_F16;
      return tensor->type_bits == 64 ? SLUICE_DTYPE_F64 : 0;
    case SLUICE_TYPE_BFLOAT: return tensor->type_bits == 16 ? SLUICE_DTYPE_BF16 : 0;
    case SLUICE_TYPE_INT:
      if (tensor->type_bits == 32) return SLUICE_DTYPE_I32;
      return tensor->type_bits == 64 ? SLUICE_DTYPE_I64 : 0;
    default: return 0;
  }
}

static sluice_status_t check_type(const sluice_tensor_t* tensor, const char* name, int32_t dtype) {
  if (tensor->type_lanes != 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: type_lanes is %u, want 1", name, (unsigned)tensor->type_lanes);
  }
  int32_t found = sluice_tensor_dtype(tensor);
  if (found == 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "%s: elements of type code %u with %u bits are unknown, want %s: convert it", name,
                       (unsigned)tensor->type_code, (unsigned)tensor->type_bits,
                       dtype == 0 ? "f32, bf16, f16, f64, i32 or i64" : sluice_dtype_name(dtype));
  }
  if (dtype != 0 && found != dtype) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: dtype is %s, want %s: convert it", name,
                       sluice_dtype_name(found), sluice_dtype_name(dtype));
  }
  return SLUICE_OK;
}

static sluice_status_t check_device(const sluice_tensor_t* tensor, const char* name, int32_t device_type,
                                    int32_t device_id) {
  if (device_type == SLUICE_DEVICE_CPU) {
    if (tensor->device_type == SLUICE_DEVICE_CPU) return SLUICE_OK;
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: device_type is %d, want %d (CPU): copy it to the host", name,
                       (int)tensor->device_type, (int)SLUICE_DEVICE_CPU);
  }
  if (tensor->device_type == device_type && tensor->device_id == device_id) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "%s: device_type is %d and device_id %d, want %d and %d (CUDA), the device of this context: move "
                     "it there",
                     name, (int)tensor->device_type, (int)tensor->device_id, (int)device_type, (int)device_id);
}

sluice_status_t sluice_tensor_check(const sluice_tensor_t* tensor, const char* name, int32_t dtype, int32_t ndim,
                                    const int64_t* shape) {
  return sluice_tensor_check_on(tensor, name, SLUICE_DEVICE_CPU, 0, dtype, ndim, shape);
}

sluice_status_t sluice_tensor_check_on(const sluice_tensor_t* tensor, const char* name, int32_t device_type,
                                       int32_t device_id, int32_t dtype, int32_t ndim, const int64_t* shape) {
  if (tensor == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: tensor is NULL, but it is required", name);
  SLUICE_TRY(check_device(tensor, name, device_type, device_id));
  SLUICE_TRY(check_type(tensor, name, dtype));
  if (tensor->ndim != ndim) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: has %d dimensions, want %d", name, (int)tensor->ndim, (int)ndim);
  }
  if (ndim > 0 && tensor->shape == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: shape is NULL, want %d sizes", name, (int)ndim);
  }
  /* A size of 0 counts as 1 here, so that strides and products of accepted tensors cannot overflow either. */
  int64_t volume = 1;
  int empty = 0;
  for (int32_t d = 0; d < ndim; ++d) {
    int64_t size = tensor->shape[d];
    if (size < 0) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: dimension %d is %lld, want a size >= 0", name, (int)d,
                         (long long)size);
    }
    if (shape != NULL && shape[d] >= 0 && size != shape[d]) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: dimension %d is %lld, want %lld", name, (int)d,
                         (long long)size, (long long)shape[d]);
    }
    if (size == 0) {
      empty = 1;
    } else if (__builtin_mul_overflow(volume, size, &volume) || volume > INT64_MAX / 8) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: the product of its sizes exceeds the range of int64", name);
    }
  }
  if (!empty && tensor->data == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: data is NULL, but the tensor has %lld elements", name,
                       (long long)volume);
  }
  return SLUICE_OK;
}

static uint64_t size_of(int64_t stride) { return stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride; }

/* Returns whether i * a + j * b = 0 for some |i| < m and |j| < n that are not both 0: the smallest are b and a, divided
 * by their greatest common divisor. */
static int overlaps(uint64_t m, uint64_t a, uint64_t n, uint64_t b) {
  if (m == 0 || n == 0) return 0;
  if (a == 0 || b == 0) return (a == 0 && m > 1) || (b == 0 && n > 1);
  uint64_t divisor = a, rest = b;
  while (rest != 0) {
    const uint64_t next = divisor % rest;
    divisor = rest, rest = next;
  }
  return b / divisor < m && a / divisor < n;
}

sluice_status_t sluice_tensor_check_written(const sluice_tensor_t* tensor, const char* name) {
  const int64_t columns = tensor->ndim == 2 ? tensor->shape[1] : 1;
  const int64_t across = tensor->ndim == 2 ? sluice_tensor_stride(tensor, 1) : 1;
  const int64_t down = sluice_tensor_stride(tensor, 0);
  if (!overlaps((uint64_t)tensor->shape[0], size_of(down), (uint64_t)columns, size_of(across))) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "%s: strides %lld, %lld of [%lld, %lld] make elements overlap, but the tensor is written; pass "
                     "one without overlap",
                     name, (long long)down, (long long)across, (long long)tensor->shape[0], (long long)columns);
}

void* sluice_tensor_data(const sluice_tensor_t* tensor) {
  return tensor->data == NULL ? NULL : (char*)tensor->data + tensor->byte_offset;
}

int64_t sluice_tensor_stride(const sluice_tensor_t* tensor, int32_t dim) {
  if (tensor->strides != NULL) return tensor->strides[dim];
  int64_t stride = 1;
  /* A size of 0 counts as 1, so that the stride of an empty tensor is still that of a row. */
  for (int32_t d = tensor->ndim - 1; d > dim; --d) stride *= tensor->shape[d] > 1 ? tensor->shape[d] : 1;
  return stride;
}

int64_t sluice_tensor_elements(const sluice_tensor_t* tensor) {
  int64_t elements = 1;
  for (int32_t d = 0; d < tensor->ndim; ++d) elements *= tensor->shape[d];
  return elements;
}
