// SPDX-License-Identifier: Apache-2.0
/* Reads and writes one element of any dtype, for tests. */
#pragma once

#include "backend/base/dtype.h"

static inline double get_element(const void* data, int64_t at, int32_t dtype) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return (double)sluice_bf16_to_f32(((const uint16_t*)data)[at]);
    case SLUICE_DTYPE_F16: return (double)sluice_f16_to_f32(((const uint16_t*)data)[at]);
    case SLUICE_DTYPE_F64: return ((const double*)data)[at];
    default: return (double)((const float*)data)[at];
  }
}

static inline void set_element(void* data, int64_t at, int32_t dtype, double value) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: ((uint16_t*)data)[at] = sluice_f32_to_bf16((float)value); break;
    case SLUICE_DTYPE_F16: ((uint16_t*)data)[at] = sluice_f32_to_f16((float)value); break;
    case SLUICE_DTYPE_F64: ((double*)data)[at] = value; break;
    case SLUICE_DTYPE_I64: ((int64_t*)data)[at] = (int64_t)value; break;
    default: ((float*)data)[at] = (float)value; break;
  }
}
