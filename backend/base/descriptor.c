// SPDX-License-Identifier: Apache-2.0
#include "backend/base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/file.h>
#include <unistd.h>

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
