// SPDX-License-Identifier: Apache-2.0
/* Fuzzes cached machines: a file is rejected as damaged or of another machine, or is valid and writes back the same. */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/calibrate/cache.h"
#include "third_party/fuzz/target.h"

static const char key[] = "a machine";

/* Enables a log, so that its messages are formatted. */
static void hear(void* user, int32_t level, const char* message) {
  (void)user, (void)level;
  FUZZ_CHECK(message[0] != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static int file = -1;
  char path[64];
  sluice_machine_t machine;
  if (file < 0) {
    file = memfd_create("cache", MFD_CLOEXEC);
    FUZZ_CHECK(file >= 0);
    sluice_set_log(hear, NULL, SLUICE_LOG_WARN);
  }
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  FUZZ_CHECK(ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == (ssize_t)size);
  if (!sluice_cache_read(path, key, 0, &machine)) return 0;
  ++fuzz_num_taken;
  FUZZ_CHECK(sluice_machine_write(&machine, NULL, 0) > 0);
  return 0;
}
