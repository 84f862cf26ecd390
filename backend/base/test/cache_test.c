// SPDX-License-Identifier: Apache-2.0
/* Eviction keeps the contents and touches no byte outside the range. A test by hand, with a clock, shows that later
 * accesses are slow. */
#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/cache.h"
#include "third_party/bazel/test.h"

/* The range's page is between two inaccessible pages. */
TEST(Evict_ARangeBetweenForbiddenPages_StaysWithinIt) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char* pages = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true((void*)pages != MAP_FAILED);
  char* own = pages + page;
  assert_int_equal(mprotect(own, page, PROT_READ | PROT_WRITE), 0);
  memset(own, 7, page);
  for (size_t from = 0; from < 130; from += 13) {
    sluice_cache_evict(own + from, page - from);
    sluice_cache_evict(own, page - from);
  }
  sluice_cache_evict(own + page, 0);
  sluice_cache_evict(NULL, 0);
  for (size_t i = 0; i < page; ++i) assert_int_equal(own[i], 7);
  munmap(pages, 3 * page);
}
