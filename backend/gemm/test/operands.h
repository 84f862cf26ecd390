// SPDX-License-Identifier: Apache-2.0
/* Operands of tests of GEMMs: elements by type, and memory at whose end an access is a fault. */
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/dtype.h"
#include "third_party/bazel/test.h"

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
    default: ((float*)data)[at] = (float)value; break;
  }
}

/* Memory between two inaccessible pages. An access outside of it ends the test, also with the address sanitizer. */
typedef struct fenced_s {
  char* map;
  size_t bytes;
  void* data; /* the last `used` bytes before the upper fence */
} fenced_t;

static inline fenced_t fenced(int64_t used) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  const size_t inside = ((size_t)used + page - 1) / page * page;
  fenced_t f = {NULL, inside + 2 * page, NULL};
  f.map = mmap(NULL, f.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(f.map != MAP_FAILED);
  assert_int_equal(mprotect(f.map, page, PROT_NONE), 0);
  assert_int_equal(mprotect(f.map + page + inside, page, PROT_NONE), 0);
  f.data = f.map + page + inside - used;
  return f;
}

static inline void unfence(fenced_t* f) { munmap(f->map, f->bytes); }
