// SPDX-License-Identifier: Apache-2.0
/* The ranges for which huge pages are requested with SLUICE_HUGE_PAGES=1. The kernel reports them in /proc/self/smaps
 * (flag "hg"). */
#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/alloc.h"
#include "backend/base/pages.h"
#include "backend/base/pages_rates.h"
#include "third_party/bazel/test.h"

#define MIB ((uint64_t)1 << 20)

static void skip_without_huge_pages(void) {
  if (access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) != 0) skip_because("this kernel has no huge pages");
}

static char* fresh(uint64_t bytes) {
  char* data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(data != MAP_FAILED);
  return data;
}

/* Whether the mapping with this address has the flag. */
static int is_advised(const void* address) {
  FILE* file = fopen("/proc/self/smaps", "r");
  assert_non_null(file);
  char line[512];
  int inside = 0, found = 0;
  while (fgets(line, sizeof line, file) != NULL) {
    unsigned long begin = 0, end = 0;
    if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) {
      inside = (unsigned long)address >= begin && (unsigned long)address < end;
    } else if (inside && strncmp(line, "VmFlags:", 8) == 0) {
      found = strstr(line, " hg") != NULL;
      break;
    }
  }
  fclose(file);
  return found;
}

TEST(Advise_LargeRange_IsFlaggedWithinItOnly) {
  skip_without_huge_pages();
  char* data = fresh(16 * MIB);
  char* aligned = (char*)(((uintptr_t)data + 2 * MIB - 1) & ~(uintptr_t)(2 * MIB - 1));
  sluice_pages_advise(aligned + 1, 6 * MIB); /* two whole huge pages: from 2 to 6 MiB */
  assert_false(is_advised(aligned));
  assert_true(is_advised(aligned + 2 * MIB) && is_advised(aligned + 6 * MIB - 1));
  assert_false(is_advised(aligned + 6 * MIB));
  munmap(data, 16 * MIB);
}

TEST(Advise_SmallRangeOrNothing_IsLeftAlone) {
  skip_without_huge_pages();
  char* data = fresh(8 * MIB);
  sluice_pages_advise(data, SLUICE_PAGES_LARGE - 1);
  sluice_pages_advise(NULL, 8 * MIB);
  sluice_pages_advise_tensor(NULL);
  for (uint64_t at = 0; at < 8 * MIB; at += MIB) assert_false(is_advised(data + at));
  munmap(data, 8 * MIB);
}

static sluice_tensor_t matrix(void* data, int64_t* shape, int64_t* strides) {
  return (sluice_tensor_t){.data = data,
                           .device_type = SLUICE_DEVICE_CPU,
                           .ndim = 2,
                           .type_code = SLUICE_TYPE_FLOAT,
                           .type_bits = 32,
                           .type_lanes = 1,
                           .shape = shape,
                           .strides = strides};
}

TEST(AdviseTensor_TransposedIsDense_GapsAndOtherDevicesAreLeftAlone) {
  skip_without_huge_pages();
  int64_t shape[] = {1024, 2048}, turned[] = {1, 1024}, gaps[] = {4096, 1};
  char* data = fresh(32 * MIB);
  sluice_tensor_t with_gaps = matrix(data, shape, gaps);
  sluice_pages_advise_tensor(&with_gaps);
  sluice_tensor_t elsewhere = matrix(data, shape, NULL);
  elsewhere.device_type = SLUICE_DEVICE_CUDA;
  sluice_pages_advise_tensor(&elsewhere);
  assert_false(is_advised(data + 4 * MIB));
  sluice_tensor_t transposed = matrix(data, shape, turned);
  sluice_pages_advise_tensor(&transposed);
  assert_true(is_advised(data + 4 * MIB));
  munmap(data, 32 * MIB);
}

/* Each slice is too small for huge pages, but all are in one allocation, as with stacked experts. */
TEST(AdviseSlices_OfOneAllocation_AreOneRange) {
  skip_without_huge_pages();
  int64_t shape[] = {256, 1024};
  char* data = fresh(16 * MIB);
  sluice_tensor_t first[8], second[8];
  for (int i = 0; i < 8; ++i) { /* [first; second] of expert 0, of expert 1, ... */
    first[i] = matrix(data + (uint64_t)i * 2 * MIB, shape, NULL);
    second[i] = matrix(data + (uint64_t)i * 2 * MIB + MIB, shape, NULL);
  }
  const sluice_tensor_t* const first_only[] = {first, NULL};
  sluice_pages_advise_slices(first_only, 2, 8, NULL);
  assert_false(is_advised(data + 8 * MIB));
  const sluice_tensor_t* const both[] = {first, second};
  sluice_pages_advise_slices(both, 2, 8, NULL);
  assert_true(is_advised(data + 8 * MIB));
  munmap(data, 16 * MIB);
}

TEST(Alloc_LargeBlock_ComesInHugePages) {
  skip_without_huge_pages();
  char* data = sluice_alloc(sluice_process_allocator(), 64 * MIB, "a test");
  assert_true(is_advised(data + 32 * MIB));
  sluice_free(sluice_process_allocator(), data, 64 * MIB);
}

int main(void) {
  setenv("SLUICE_HUGE_PAGES", "1", 1);
  return run_cases(NULL, NULL);
}
