// SPDX-License-Identifier: Apache-2.0
#include "capi/test/optimizer/failing_disk.h"

#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

_Atomic int64_t disk_calls_left[NUM_DISK_CALLS] = {NEVER, NEVER, NEVER};
_Atomic int64_t disk_calls[NUM_DISK_CALLS];
how_t disk_how;
_Atomic ino_t disk_only_file;
_Atomic int32_t disk_is_full;

static int strikes(int which, int fd) {
  struct stat file;
  if (disk_only_file != 0 && (fstat(fd, &file) != 0 || file.st_ino != disk_only_file)) return 0;
  atomic_fetch_add(&disk_calls[which], 1);
  if (disk_calls_left[which] == NEVER) return 0;
  if (disk_how == DIES && disk_calls_left[which] == 0) {
    errno = EIO;
    return 1;
  }
  if (atomic_fetch_sub(&disk_calls_left[which], 1) != 0) return 0;
  if (disk_how == KILLS) (void)raise(SIGKILL);
  errno = which == 1 ? ENOSPC : EIO;
  return 1;
}

ssize_t __real_pread(int fd, void* data, size_t bytes, off_t at);
ssize_t __wrap_pread(int fd, void* data, size_t bytes, off_t at);
ssize_t __wrap_pread(int fd, void* data, size_t bytes, off_t at) {
  return strikes(0, fd) ? -1 : __real_pread(fd, data, bytes > 1 ? (bytes + 1) / 2 : bytes, at); /* at least two reads */
}

ssize_t __real_pwrite(int fd, const void* data, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int fd, const void* data, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int fd, const void* data, size_t bytes, off_t at) {
  return strikes(1, fd) ? -1 : __real_pwrite(fd, data, bytes, at);
}

int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
int __wrap_fdatasync(int fd) { return strikes(2, fd) ? -1 : __real_fdatasync(fd); }

int __real_posix_fallocate(int fd, off_t at, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t at, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t at, off_t bytes) {
  return disk_is_full ? ENOSPC : __real_posix_fallocate(fd, at, bytes);
}
