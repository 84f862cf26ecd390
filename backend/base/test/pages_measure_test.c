// SPDX-License-Identifier: Apache-2.0
/* Measuring fresh ranges keeps their contents; other ranges are not populated. */
#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/pages.h"
#include "third_party/bazel/test.h"

enum { MIB = 1 << 20, BYTES = 32 * MIB };

static unsigned char* fresh(void) {
  unsigned char* data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(data != MAP_FAILED);
  (void)madvise(data, BYTES, MADV_NOHUGEPAGE); /* on systems that always use huge pages: populated page by page */
  return data;
}

/* The share of the range's pages that are in memory. */
static double share_in_memory(void* data) {
  static unsigned char state[BYTES / 4096];
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), count = BYTES / page;
  assert_true(count <= sizeof state && mincore(data, BYTES, state) == 0);
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) found += state[i] & 1;
  return (double)found / (double)count;
}

TEST(Advise_FreshRange_IsBroughtInUnchanged) {
  unsigned char* data = fresh();
  for (int i = 0; i < 32; ++i) data[i * MIB + 4096 * 3 + 5] = (unsigned char)(i + 1);
  assert_true(share_in_memory(data) < 0.1);
  sluice_pages_advise(data, BYTES);
  assert_true(share_in_memory(data) > 0.5); /* all, or the half with small pages and a part of the other half */
  for (int i = 0; i < BYTES; ++i) {
    const int in = i % MIB == 4096 * 3 + 5;
    if (data[i] != (in ? i / MIB + 1 : 0)) fail_msg("byte %d is %d", i, data[i]);
  }
  munmap(data, BYTES);
}

TEST(AdviseRoom_FreshRange_IsNotBroughtIn) {
  unsigned char* data = fresh();
  sluice_pages_advise_room(data, BYTES);
  assert_true(share_in_memory(data) < 0.1);
  munmap(data, BYTES);
}

/* The first four ranges and one of sixteen later ranges are measured; writes populate the others. */
TEST(Advise_AfterSome_MeasuresFewOnly) {
  int measured = 0;
  for (int i = 0; i < 40; ++i) {
    unsigned char* data = fresh();
    sluice_pages_advise(data, BYTES);
    measured += share_in_memory(data) > 0.3;
    munmap(data, BYTES);
  }
  assert_in_range(measured, 3, 7);
}

TEST(Advise_MemoryThatIsThere_IsNotMeasured) {
  unsigned char* data = fresh();
  memset(data, 1, BYTES - 6 * MIB);
  for (int i = 0; i < 40; ++i) sluice_pages_advise(data, BYTES);
  assert_true(share_in_memory(data + 0) < 0.9);
  munmap(data, BYTES);
}

int main(void) {
  unsetenv("SLUICE_HUGE_PAGES");
  setenv("SLUICE_CACHE_DIR", "/dev/null", 1); /* no rates from earlier processes */
  return run_cases(NULL, NULL);
}
