// SPDX-License-Identifier: Apache-2.0
#include "backend/base/file_io.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

/* ---- descriptors ---- */

/* Held from before a descriptor is opened until it is recorded, and during every fork. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static sluice_descriptor_t* first;

int sluice_descriptor_open(sluice_descriptor_t* descriptor, const char* path, int flags) {
  pthread_mutex_lock(&mutex);
  const int fd = open(path, flags | O_CLOEXEC, 0600);
  const int error = errno;
  *descriptor = (sluice_descriptor_t){.fd = fd};
  if (fd >= 0) {
    descriptor->next = first;
    if (first != NULL) first->previous = descriptor;
    first = descriptor;
  }
  pthread_mutex_unlock(&mutex);
  errno = error;
  return fd;
}

void sluice_descriptor_close(sluice_descriptor_t* descriptor) {
  pthread_mutex_lock(&mutex);
  if (descriptor->fd >= 0) {
    if (descriptor->next != NULL) descriptor->next->previous = descriptor->previous;
    if (descriptor->previous != NULL) descriptor->previous->next = descriptor->next;
    if (first == descriptor) first = descriptor->next;
    (void)flock(descriptor->fd, LOCK_UN);
    (void)close(descriptor->fd);
  }
  descriptor->fd = -1;
  pthread_mutex_unlock(&mutex);
}

static void before_fork(void) { pthread_mutex_lock(&mutex); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&mutex); }

/* Calls only functions that are safe between fork and exec, and does not release file locks, which belong to the
 * parent. */
static void after_fork_in_child(void) {
  for (sluice_descriptor_t* d = first; d != NULL; d = d->next) {
    (void)close(d->fd);
    d->fd = -1;
  }
  first = NULL;
  pthread_mutex_unlock(&mutex); /* held by this thread, which is the one that forked */
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- reads and writes ---- */

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
