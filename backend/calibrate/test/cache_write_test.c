// SPDX-License-Identifier: Apache-2.0
/* A measured machine is synced to disk before its file gets its name. The linker prefers this program's fsync and
 * rename over those of the C library, so they record the order of the calls. */
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/calibrate/cache.h"
#include "third_party/bazel/test.h"

static struct stat synced, renamed;

int fsync(int descriptor) {
  if (fstat(descriptor, &synced) != 0) abort();
  return (int)syscall(SYS_fsync, descriptor);
}

int rename(const char* from, const char* to) {
  if (stat(from, &renamed) != 0) abort();
  return (int)syscall(SYS_renameat2, -100 /* AT_FDCWD */, from, -100, to, 0);
}

static char folder[] = "/tmp/sluice_cache_XXXXXX", path[64];

static int set_up(void** state) {
  (void)state;
  if (mkdtemp(folder) == NULL) return 1;
  snprintf(path, sizeof path, "%s/machine.json", folder);
  return 0;
}

static int tear_down(void** state) {
  (void)state;
  unlink(path);
  return rmdir(folder);
}

TEST(CacheWrite_File_IsOnTheDiskBeforeItHasItsName) {
  sluice_machine_t machine, again;
  static const char text[] = "{\"sluice_machine\": 2, \"name\": \"a test\", \"op_seconds\": 3e-6}";
  assert_int_equal(sluice_machine_read(text, sizeof text - 1, &machine), SLUICE_OK);
  assert_int_equal(sluice_cache_write(path, "a key", &machine), 1);
  assert_true(renamed.st_size > (off_t)sizeof text);
  assert_true(synced.st_ino == renamed.st_ino && synced.st_size == renamed.st_size);
  assert_int_equal(sluice_cache_read(path, "a key", 1, &again), 1);
  assert_true(again.op_seconds == machine.op_seconds);
}

int main(void) { return run_cases(set_up, tear_down); }
