// SPDX-License-Identifier: Apache-2.0
#include "backend/base/file_io.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

/* The system transfers at most 2 GiB less a page per call. */
#define MOST_AT_ONCE (UINT64_C(1) << 30)

sluice_status_t sluice_file_read_at(int fd, const char* owner, const char* path, uint64_t at, void* out,
                                    uint64_t bytes) {
  for (uint64_t done = 0; done < bytes;) {
    const size_t wanted = (size_t)(bytes - done < MOST_AT_ONCE ? bytes - done : MOST_AT_ONCE);
    const ssize_t got = pread(fd, (char*)out + done, wanted, (off_t)(at + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return SLUICE_FAIL(SLUICE_E_EXTERNAL, "%s: %s: reading %llu bytes at %llu: %s", owner, path,
                         (unsigned long long)(bytes - done), (unsigned long long)(at + done), strerror(errno));
    }
    if (got == 0) {
      return SLUICE_FAIL(SLUICE_E_EXTERNAL, "%s: %s is truncated: it ends at byte %llu, %llu bytes too early", owner,
                         path, (unsigned long long)(at + done), (unsigned long long)(bytes - done));
    }
    done += (uint64_t)got;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_file_write_at(int fd, const char* owner, const char* path, uint64_t at, const void* data,
                                     uint64_t bytes) {
  for (uint64_t done = 0; done < bytes;) {
    const size_t wanted = (size_t)(bytes - done < MOST_AT_ONCE ? bytes - done : MOST_AT_ONCE);
    const ssize_t put = pwrite(fd, (const char*)data + done, wanted, (off_t)(at + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      return SLUICE_FAIL(SLUICE_E_EXTERNAL, "%s: %s: writing %llu bytes at %llu: %s", owner, path,
                         (unsigned long long)(bytes - done), (unsigned long long)(at + done),
                         put == 0 ? "no byte was written" : strerror(errno));
    }
    done += (uint64_t)put;
  }
  return SLUICE_OK;
}
