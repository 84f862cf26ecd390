// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_descriptors.h"

#include <errno.h>
#include <linux/sockios.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/tcp/tcp_keepalive.h"

/* The default limit of Linux on descriptors per process (fs.nr_open). Pages of the table without entries cost no
 * memory. */
enum { MAX_DESCRIPTORS = 1 << 20 };

static uint64_t held[MAX_DESCRIPTORS / 64]; /* one bit per descriptor */
static int num_words;                       /* of `held`, up to the last one with a bit */
/* Held from before a descriptor is opened until it is recorded, and during every fork, so that a child finds all its
 * descriptors recorded. Everything done with the mutex held returns at once. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int note(int fd) {
  if (fd >= MAX_DESCRIPTORS) {
    close(fd);
    errno = EMFILE;
    return -1;
  }
  if (fd < 0) return fd;
  held[fd / 64] |= UINT64_C(1) << (fd % 64);
  if (num_words <= fd / 64) num_words = fd / 64 + 1;
  return fd;
}

int sluice_tcp_open_socket(int family) {
  pthread_mutex_lock(&mutex);
  const int fd = note(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  pthread_mutex_unlock(&mutex);
  if (fd >= 0) sluice_tcp_enable_keepalive(fd);
  return fd;
}

int sluice_tcp_accept(int listener) {
  pthread_mutex_lock(&mutex);
  const int fd = note(accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
  pthread_mutex_unlock(&mutex);
  return fd;
}

int sluice_tcp_open_epoll(void) {
  pthread_mutex_lock(&mutex);
  const int fd = note(epoll_create1(EPOLL_CLOEXEC));
  pthread_mutex_unlock(&mutex);
  return fd;
}

int sluice_tcp_open_eventfd(void) {
  pthread_mutex_lock(&mutex);
  const int fd = note(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  pthread_mutex_unlock(&mutex);
  return fd;
}

void sluice_tcp_close(int fd) {
  if (fd < 0) return;
  pthread_mutex_lock(&mutex);
  held[fd / 64] &= ~(UINT64_C(1) << (fd % 64));
  close(fd);
  pthread_mutex_unlock(&mutex);
}

int sluice_tcp_has_descriptor(int (*is_it)(int fd)) {
  int has = 0;
  pthread_mutex_lock(&mutex);
  for (int word = 0; word < num_words && !has; ++word) {
    for (uint64_t left = held[word]; left != 0 && !has; left &= left - 1)
      has = is_it(word * 64 + __builtin_ctzll(left));
  }
  pthread_mutex_unlock(&mutex);
  return has;
}

/* ---- forks ------------------------------------------------------------------------------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&mutex); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&mutex); }

/* Calls only functions that are safe between fork and exec. The handles that have these descriptors are inert in the
 * child (comm.c). The table is cleared, because in a child of this child the numbers may be other descriptors. */
static void after_fork_in_child(void) {
  for (int word = 0; word < num_words; ++word) {
    for (int bit = 0; bit < 64 && held[word] != 0; ++bit) {
      if ((held[word] >> bit & 1) != 0) close(word * 64 + bit);
      held[word] &= ~(UINT64_C(1) << bit);
    }
  }
  num_words = 0;
  pthread_mutex_unlock(&mutex); /* held by this thread, which is the one that forked */
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- shutdown ---------------------------------------------------------------------------------------------------- */

#define SHUTDOWN_NS UINT64_C(1000000000)

int sluice_tcp_send_lost_rank(int socket, const void* frame, uint64_t bytes) {
  return send(socket, frame, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

int sluice_tcp_is_shut_down(int socket, int is_told) {
  char thrown_away[65536];
  ssize_t n = 1;
  for (int turn = 0; n > 0 && turn < 256; ++turn) n = recv(socket, thrown_away, sizeof thrown_away, MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return 1;
  int unconfirmed = 0;
  return is_told && (ioctl(socket, SIOCOUTQ, &unconfirmed) != 0 || unconfirmed == 0);
}

int sluice_tcp_shutdown_goes_on(uint64_t begin_ns) {
  const struct timespec pause = {.tv_nsec = 1000000};
  nanosleep(&pause, NULL);
  return sluice_now_ns() - begin_ns < SHUTDOWN_NS;
}
