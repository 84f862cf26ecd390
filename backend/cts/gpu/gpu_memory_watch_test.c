// SPDX-License-Identifier: Apache-2.0
/* When the watch of device memory reports a leak. */
#include "backend/cts/gpu/gpu_memory_watch.h"

#include "third_party/bazel/test.h"

enum { CASES = 30 };
#define AT_FIRST ((size_t)8 << 30)

/* Returns the case at which the watch fails, or -1. Every case from the ninth on loses `loss` bytes. */
static int failing_case(gpu_memory_watch_kind_t kind, size_t loss) {
  gpu_memory_watch_t watch = {.kind = kind};
  for (int i = 0; i < CASES; ++i) {
    const size_t lost = i < 8 ? 0 : (size_t)(i - 7) * loss;
    if (gpu_memory_seen(&watch, AT_FIRST - lost) != NULL) return i;
  }
  return -1;
}

TEST(MemoryWatch_LossAfterLoss_FailsOnlyWhereManyCasesRun) {
  assert_int_equal(failing_case(GPU_MEMORY_LOSSES_ARE_NOTED, GPU_MEMORY_LOSS + 1), -1);
  assert_int_equal(failing_case(GPU_MEMORY_NOT_WATCHED, GPU_MEMORY_LOSS + 1), -1);
  assert_int_equal(failing_case(GPU_MEMORY_LOSSES_FAIL, GPU_MEMORY_LOSS + 1), 8 + 4);
}

/* Pools vary: small changes do not count unless they add up to a loss. */
TEST(MemoryWatch_LittleByLittle_IsALossOnceItSumsUp) {
  assert_int_equal(failing_case(GPU_MEMORY_LOSSES_FAIL, GPU_MEMORY_LOSS / CASES), -1);
  assert_int_equal(failing_case(GPU_MEMORY_LOSSES_FAIL, GPU_MEMORY_LOSS / 2), 8 + 3 * 5 - 1);
}
