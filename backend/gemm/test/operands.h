// SPDX-License-Identifier: Apache-2.0
/* Operands of tests of GEMMs: elements by type (elements.h), and memory at whose end an access is a fault. */
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/test/elements.h"
#include "third_party/bazel/test.h"

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
