// SPDX-License-Identifier: Apache-2.0
/* Typed arrays on the machine of a rank, which tests read and write. */
#include "capi/test/world/world_split.h"

#include <stdlib.h>
#include <string.h>
#include "backend/base/tensor.h"

_Thread_local world_here_t world_here;

void* world_take(uint64_t bytes) {
  return world_here.machine != NULL ? world_here.machine->allocate(world_here.rank, bytes) : malloc(bytes);
}
void world_give(void* data) {
  if (world_here.machine != NULL && data != NULL) {
    world_here.machine->release(data);
  } else {
    free(data);
  }
}
sluice_stream_t world_stream_here(void) {
  return world_here.machine != NULL ? world_here.machine->stream(world_here.rank) : NULL;
}
void world_settle(void) {
  if (world_here.machine != NULL) world_here.machine->settle(world_here.rank);
}
void world_tell(const case_t* c, int32_t direction, int32_t has_returned) {
  if (c->note != NULL) c->note(world_here.rank, direction, has_returned);
  if (world_here.machine != NULL && world_here.machine->note != NULL)
    world_here.machine->note(world_here.rank, direction, has_returned);
}

void world_make_array(array_t* a, int32_t dtype, int32_t ndim, int64_t rows, int64_t cols, int64_t row_stride,
                      int64_t col_stride) {
  memset(a, 0, sizeof *a);
  int64_t elements =
      rows * (ndim == 2 ? (row_stride > cols ? row_stride : cols) : 1) + (col_stride > 1 ? cols * col_stride : 0);
  a->bytes = (uint64_t)(elements + 1) * sluice_dtype_bytes(dtype);
  a->host = malloc(a->bytes);
  memset(a->host, 0xff, a->bytes); /* NaN */
  a->tensor.data = world_here.machine != NULL ? world_take(a->bytes) : a->host;
  a->tensor.device_type = world_here.machine != NULL ? world_here.machine->device_type : SLUICE_DEVICE_CPU;
  a->tensor.device_id = world_here.machine != NULL ? world_here.machine->device_id(world_here.rank) : 0;
  a->tensor.ndim = ndim;
  a->tensor.type_code = dtype == SLUICE_DTYPE_I64    ? SLUICE_TYPE_INT
                        : dtype == SLUICE_DTYPE_BF16 ? SLUICE_TYPE_BFLOAT
                                                     : SLUICE_TYPE_FLOAT;
  a->tensor.type_bits = (uint8_t)(8 * sluice_dtype_bytes(dtype));
  a->tensor.type_lanes = 1;
  a->shape[0] = rows, a->shape[1] = cols;
  a->strides[0] = row_stride, a->strides[1] = col_stride;
}

int32_t world_dtype_of(const array_t* a) { return sluice_tensor_dtype(&a->tensor); }

void world_push(const array_t* a) {
  if (world_here.machine != NULL) world_here.machine->send(world_here.rank, a->tensor.data, a->host, a->bytes);
}
void world_pull(const array_t* a) {
  if (world_here.machine != NULL) world_here.machine->fetch(world_here.rank, a->host, a->tensor.data, a->bytes);
}
void world_drop_array(array_t* a) {
  if (a->is_part) return;
  if (world_here.machine != NULL) world_give(a->tensor.data);
  free(a->host);
}

/* Shape pointers are set when the array has its final address. */
const sluice_tensor_t* world_tensor_of(array_t* a) {
  a->tensor.shape = a->shape;
  a->tensor.strides = a->strides;
  return &a->tensor;
}

void world_make_rows(array_t* a, int32_t dtype, int64_t rows, int64_t cols, int64_t pad) {
  world_make_array(a, dtype, 2, rows, cols, cols + pad, 1);
}
