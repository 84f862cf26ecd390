// SPDX-License-Identifier: Apache-2.0
/* Data of the tests of row kernels: buffers of any dtype with values of mixed magnitudes and a guard after each. */
#pragma once

#include <math.h>

#include "backend/base/dtype.h"
#include "third_party/bazel/test.h"

enum { GUARD = 80 };

static const int32_t DTYPES[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};

static uint64_t seed = 1;
static inline uint32_t random_bits(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33);
}
static inline double random_real(void) { return ((double)random_bits() / 2147483648.0 - 0.5) * 6; }

static inline double get(int32_t dtype, const void* data, int64_t i) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: return (double)((const float*)data)[i];
    case SLUICE_DTYPE_BF16: return (double)sluice_bf16_to_f32(((const uint16_t*)data)[i]);
    case SLUICE_DTYPE_F16: return (double)sluice_f16_to_f32(((const uint16_t*)data)[i]);
    default: return ((const double*)data)[i];
  }
}

static inline void put(int32_t dtype, void* data, int64_t i, double x) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: ((float*)data)[i] = (float)x; break;
    case SLUICE_DTYPE_BF16: ((uint16_t*)data)[i] = sluice_f32_to_bf16((float)x); break;
    case SLUICE_DTYPE_F16: ((uint16_t*)data)[i] = sluice_f32_to_f16((float)x); break;
    default: ((double*)data)[i] = x; break;
  }
}

/* 1: new buffers start one element after a boundary of 64 bytes; 0: at the boundary. A guard follows the elements. */
static int shift;

typedef struct {
  void* data;
  void* block;
  int32_t dtype;
  int64_t count;
} buffer_t;

static inline buffer_t buffer(int32_t dtype, int64_t count) {
  size_t bytes = sluice_dtype_bytes(dtype);
  buffer_t b = {.dtype = dtype, .count = count};
  assert_int_equal(posix_memalign(&b.block, 64, (size_t)(count + GUARD + 1) * bytes), 0);
  b.data = (char*)b.block + (shift ? bytes : 0);
  for (int64_t i = 0; i < count + GUARD; ++i) put(dtype, b.data, i, NAN);
  return b;
}

static inline buffer_t random_buffer(int32_t dtype, int64_t count) {
  buffer_t b = buffer(dtype, count);
  for (int64_t i = 0; i < count; ++i) put(dtype, b.data, i, random_real());
  return b;
}

static inline buffer_t copy_of(const buffer_t* a) {
  buffer_t b = buffer(a->dtype, a->count);
  memcpy(b.data, a->data, (size_t)a->count * sluice_dtype_bytes(a->dtype));
  return b;
}

static inline void release(buffer_t* b) {
  for (int64_t i = 0; i < GUARD; ++i) assert_true(isnan(get(b->dtype, b->data, b->count + i)));
  free(b->block);
}

static inline int same(double x, double y) { return x == y || (isnan(x) && isnan(y)); }

static inline void assert_same(const buffer_t* want, const buffer_t* got, const char* what) {
  for (int64_t i = 0; i < want->count; ++i) {
    double x = get(want->dtype, want->data, i), y = get(got->dtype, got->data, i);
    if (!same(x, y)) {
      fail_msg("%s, %s: element %lld is %.9g, want %.9g", what, sluice_dtype_name(want->dtype), (long long)i, y, x);
    }
  }
}
