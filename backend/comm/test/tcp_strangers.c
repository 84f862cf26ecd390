// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/test/tcp_strangers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_open, is_over;

static void set(int* what) {
  pthread_mutex_lock(&mutex);
  *what = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

static void wait_at_gate(tcp_rank_t* me) {
  pthread_mutex_lock(&mutex);
  while (me->rank != 0 && !is_open) pthread_cond_wait(&changed, &mutex);
  pthread_mutex_unlock(&mutex);
}

/* Returns 1 if the ranks have finished. */
static int wait_a_second(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  ++until.tv_sec;
  pthread_mutex_lock(&mutex);
  if (!is_over) (void)pthread_cond_timedwait(&changed, &mutex, &until);
  const int is_through = is_over;
  pthread_mutex_unlock(&mutex);
  return is_through;
}

/* At this time only rank 0 listens. */
static void find_listeners(tcp_strangers_t* s) {
  s->num_listeners = 0;
  while (s->num_listeners == 0) {
    const struct timespec pause = {.tv_nsec = 1000000};
    nanosleep(&pause, NULL);
    for (int fd = 3; fd < 1024 && s->num_listeners < 16; ++fd) {
      struct sockaddr_in6* address = &s->listeners[s->num_listeners];
      socklen_t length = sizeof *address, size = sizeof(int);
      int is_listening = 0;
      memset(address, 0, sizeof *address);
      if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &size) != 0 || !is_listening) continue;
      if (getsockname(fd, (struct sockaddr*)address, &length) != 0) continue;
      s->num_listeners += address->sin6_family == AF_INET6 || address->sin6_family == AF_INET;
    }
  }
}

static int come(const tcp_strangers_t* s) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  /* The port has the same offset in both families. */
  struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_port = s->listeners[0].sin6_port};
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, (struct sockaddr*)&loopback, sizeof loopback) != 0) abort();
  if (!s->is_slow && s->num_words > 0) (void)send(fd, s->words, s->num_words, MSG_NOSIGNAL);
  return fd;
}

static void hear_first(tcp_strangers_t* s, int fd) {
  ssize_t n;
  while (s->num_heard < sizeof s->heard &&
         (n = recv(fd, s->heard + s->num_heard, sizeof s->heard - s->num_heard, 0)) > 0) {
    s->num_heard += (size_t)n;
  }
}

static void* besiege(void* argument) {
  tcp_strangers_t* s = argument;
  int fds[MAX_STRANGERS];
  find_listeners(s);
  for (int32_t i = 0; i < s->count; ++i) fds[i] = come(s);
  set(&is_open);
  for (size_t word = 0; !wait_a_second(); ++word) {
    for (int32_t i = 0; i < s->count && s->is_slow && word < s->num_words; ++i) {
      (void)send(fds[i], (const char*)s->words + word, 1, MSG_NOSIGNAL);
    }
  }
  if (s->count > 0 && s->num_words > 0 && !s->is_slow) hear_first(s, fds[0]);
  for (int32_t i = 0; i < s->count; ++i) close(fds[i]);
  return NULL;
}

uint64_t tcp_strangers_run(tcp_strangers_t* strangers, tcp_rank_t* ranks, int32_t world_size) {
  pthread_t thread;
  uint64_t longest_ns = 0;
  is_open = is_over = 0;
  strangers->num_heard = 0;
  for (int32_t r = 0; r < world_size; ++r) ranks[r].first = wait_at_gate;
  if (pthread_create(&thread, NULL, besiege, strangers) != 0) abort();
  tcp_ranks_run(ranks, world_size);
  set(&is_over);
  pthread_join(thread, NULL);
  for (int32_t r = 1; r < world_size; ++r) {
    if (ranks[r].created_ns > longest_ns) longest_ns = ranks[r].created_ns;
  }
  return longest_ns;
}
