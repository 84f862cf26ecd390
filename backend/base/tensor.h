// SPDX-License-Identifier: Apache-2.0
/* Checked access to a host's tensors. A public call checks each tensor once with sluice_tensor_check, naming it;
 * afterwards the other functions may trust it. */
#pragma once

#include "backend/base/status.h"

/* Returns the SLUICE_DTYPE_* of the elements; 0 for NULL, for lanes other than 1 and for unknown types. */
int32_t sluice_tensor_dtype(const sluice_tensor_t* tensor);

/* Returns INVALID_ARGUMENT with the tensor, its value and the expected one, unless the tensor is on the CPU, has `ndim`
 * dimensions of shape[d] elements (-1: any size), elements of `dtype` (0: any known one), and data if it has elements.
 * `shape` may be NULL: any sizes. Sizes whose product overflows are rejected. */
sluice_status_t sluice_tensor_check(const sluice_tensor_t* tensor, const char* name, int32_t dtype, int32_t ndim,
                                    const int64_t* shape);

/* The same for device `device_id` of `device_type`. */
sluice_status_t sluice_tensor_check_on(const sluice_tensor_t* tensor, const char* name, int32_t device_type,
                                       int32_t device_id, int32_t dtype, int32_t ndim, const int64_t* shape);

/* Returns INVALID_ARGUMENT naming the tensor, of one or two dimensions, if two of its elements share an address, which
 * outputs may not. Call after sluice_tensor_check. */
sluice_status_t sluice_tensor_check_written(const sluice_tensor_t* tensor, const char* name);

/* Returns the address of the first element: data plus byte_offset; NULL if data is NULL. */
void* sluice_tensor_data(const sluice_tensor_t* tensor);

/* Returns the distance of two indices of `dim`, in elements; if strides is NULL, that of row-major order. */
int64_t sluice_tensor_stride(const sluice_tensor_t* tensor, int32_t dim);

/* Returns whether a matrix with these strides is row-major or column-major, perhaps with padding: no two elements share
 * an address. Dimensions of size 1 may have any stride. */
static inline int sluice_is_matrix(const int64_t* shape, int64_t first, int64_t second) {
  if (second == 1 && (shape[0] == 1 || first >= shape[1])) return 1;
  return first == 1 && (shape[1] == 1 || second >= shape[0]);
}

/* Returns the product of the sizes. */
int64_t sluice_tensor_elements(const sluice_tensor_t* tensor);
