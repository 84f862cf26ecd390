// SPDX-License-Identifier: Apache-2.0
/* Data of the tests of row kernels: buffers of any dtype with values of mixed magnitudes and a guard after each. */
#pragma once

#include <math.h>

#include "backend/base/test/elements.h"
#include "third_party/bazel/test.h"

enum { GUARD = 80 };

static const int32_t DTYPES[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};

static uint64_t seed = 1;
static inline uint32_t random_bits(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33);
}
static inline double random_real(void) { return ((double)random_bits() / 2147483648.0 - 0.5) * 6; }

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
  for (int64_t i = 0; i < count + GUARD; ++i) set_element(b.data, i, dtype, NAN);
  return b;
}

static inline buffer_t random_buffer(int32_t dtype, int64_t count) {
  buffer_t b = buffer(dtype, count);
  for (int64_t i = 0; i < count; ++i) set_element(b.data, i, dtype, random_real());
  return b;
}

static inline buffer_t copy_of(const buffer_t* a) {
  buffer_t b = buffer(a->dtype, a->count);
  memcpy(b.data, a->data, (size_t)a->count * sluice_dtype_bytes(a->dtype));
  return b;
}

static inline void release(buffer_t* b) {
  for (int64_t i = 0; i < GUARD; ++i) assert_true(isnan(get_element(b->data, b->count + i, b->dtype)));
  free(b->block);
}

static inline int same(double x, double y) { return x == y || (isnan(x) && isnan(y)); }

static inline void assert_same(const buffer_t* want, const buffer_t* got, const char* what) {
  for (int64_t i = 0; i < want->count; ++i) {
    double x = get_element(want->data, i, want->dtype), y = get_element(got->data, i, got->dtype);
    if (!same(x, y)) {
      fail_msg("%s, %s: element %lld is %.9g, want %.9g", what, sluice_dtype_name(want->dtype), (long long)i, y, x);
    }
  }
}
