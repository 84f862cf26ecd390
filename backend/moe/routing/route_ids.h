// SPDX-License-Identifier: Apache-2.0
/* Reading expert ids of any integer type and strides. Private to moe. */
#pragma once

#include <string.h>

#include "backend/base/tensor.h"
#include "backend/moe/layer/layer.h"

typedef struct sluice_id_reader_s {
  const char* data;
  int64_t stride_t, stride_k; /* bytes */
  int wide;                   /* i64 */
} sluice_id_reader_t;

static inline sluice_id_reader_t sluice_id_reader(const sluice_tensor_t* ids) {
  sluice_id_reader_t reader = {.data = sluice_tensor_data(ids), .wide = sluice_tensor_dtype(ids) == SLUICE_DTYPE_I64};
  int64_t bytes = reader.wide ? 8 : 4;
  reader.stride_t = sluice_tensor_stride(ids, 0) * bytes;
  reader.stride_k = sluice_tensor_stride(ids, 1) * bytes;
  return reader;
}

static inline int64_t sluice_read_id(const sluice_id_reader_t* reader, int64_t t, int32_t k) {
  const char* p = reader->data + t * reader->stride_t + k * reader->stride_k;
  if (!reader->wide) {
    int32_t value;
    memcpy(&value, p, sizeof value);
    return value;
  }
  int64_t value;
  memcpy(&value, p, sizeof value);
  return value;
}

/* The place of a route's expert; -1: the route is dropped. Errors: INVALID_ARGUMENT naming the entry. */
static inline sluice_status_t sluice_place_of_route(const sluice_moe_t* moe, const sluice_id_reader_t* reader,
                                                    int64_t t, int32_t k, int32_t* out_place) {
  int64_t id = sluice_read_id(reader, t, k);
  if (id < -1 || id >= moe->shape.config.num_experts) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: expert_ids[%lld, %d] is %lld; ids lie in [0, %d), or -1 to drop the route",
                       moe->shape.config.layer_id, (long long)t, k, (long long)id, moe->shape.config.num_experts);
  }
  *out_place = id < 0 ? -1 : moe->expert_position[id];
  return SLUICE_OK;
}
