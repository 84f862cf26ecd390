// SPDX-License-Identifier: Apache-2.0
/* Strangers neither prevent nor delay a start, and none of them is accepted: idle and slow ones, and strangers that
 * send arbitrary data. */
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "backend/comm/test/tcp_ranks.h"
#include "third_party/bazel/test.h"

enum { WORLD = 3, MANY = 200, MOST_LISTENERS = 16, TURNS = 3, GREETING_BYTES = 32 };

#define SECOND_NS UINT64_C(1000000000)

/* Connections from outside of the job. They reach rank 0 before other ranks, which start then, and stay. */
typedef struct strangers_s {
  int32_t count;
  const void* words; /* each stranger sends them at once, or one byte per second */
  size_t num_words;
  int is_slow;
  /* Results. */
  struct sockaddr_in6 listeners[MOST_LISTENERS]; /* rank 0's */
  int32_t num_listeners;
} strangers_t;

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
static void find_listeners(strangers_t* s) {
  s->num_listeners = 0;
  while (s->num_listeners == 0) {
    const struct timespec pause = {.tv_nsec = 1000000};
    nanosleep(&pause, NULL);
    for (int fd = 3; fd < 1024 && s->num_listeners < MOST_LISTENERS; ++fd) {
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

static int come(const strangers_t* s) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  /* The port has the same offset in both families. */
  struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_port = s->listeners[0].sin6_port};
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, (struct sockaddr*)&loopback, sizeof loopback) != 0) abort();
  if (!s->is_slow && s->num_words > 0) (void)send(fd, s->words, s->num_words, MSG_NOSIGNAL);
  return fd;
}

static void* besiege(void* argument) {
  strangers_t* s = argument;
  int fds[MANY];
  find_listeners(s);
  for (int32_t i = 0; i < s->count; ++i) fds[i] = come(s);
  set(&is_open);
  for (size_t word = 0; !wait_a_second(); ++word) {
    for (int32_t i = 0; i < s->count && s->is_slow && word < s->num_words; ++i) {
      (void)send(fds[i], (const char*)s->words + word, 1, MSG_NOSIGNAL);
    }
  }
  for (int32_t i = 0; i < s->count; ++i) close(fds[i]);
  return NULL;
}

/* Runs the ranks. Returns the longest time that a rank other than 0 took to create its communicator. */
static uint64_t run_with(strangers_t* strangers, tcp_rank_t* ranks, int32_t world_size) {
  pthread_t thread;
  uint64_t longest_ns = 0;
  is_open = is_over = 0;
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

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static void all_are_well(const tcp_rank_t* ranks, int32_t world_size) {
  for (int32_t r = 0; r < world_size; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %d, %s", r, ranks[r].status, ranks[r].why.message);
  }
}

/* The best of three turns, since the machine may be busy. */
static uint64_t best_start_ns(const strangers_t* strangers) {
  uint64_t best_ns = UINT64_MAX;
  for (int turn = 0; turn < TURNS; ++turn) {
    tcp_rank_t ranks[WORLD] = {
        {.then = tcp_ranks_exchange}, {.then = tcp_ranks_exchange}, {.then = tcp_ranks_exchange}};
    strangers_t own = *strangers;
    const uint64_t took_ns = run_with(&own, ranks, WORLD);
    all_are_well(ranks, WORLD);
    if (took_ns < best_ns) best_ns = took_ns;
  }
  return best_ns;
}

static void do_not_delay(const strangers_t* strangers) {
  static const strangers_t none = {.count = 0};
  const uint64_t clean_ns = best_start_ns(&none), with_ns = best_start_ns(strangers);
  print_message("started in %.3f s, without strangers in %.3f s\n", (double)with_ns / 1e9, (double)clean_ns / 1e9);
  assert_true(with_ns < clean_ns + SECOND_NS);
}

TEST(TcpStart_IdleStrangers_DelayNobody) {
  const strangers_t strangers = {.count = MANY};
  do_not_delay(&strangers);
}

/* The bytes begin as a rank's greeting does, so rank 0 cannot reject them early. */
TEST(TcpStart_StrangersOfAByteASecond_DelayNobody) {
  char greeting[GREETING_BYTES] = "sluicet2";
  const int32_t from_1_to_0[] = {1, 0};
  memcpy(greeting + 8, from_1_to_0, sizeof from_1_to_0);
  const strangers_t strangers = {.count = MANY, .words = greeting, .num_words = sizeof greeting, .is_slow = 1};
  do_not_delay(&strangers);
}

TEST(TcpStart_StrangersThatTalkGarbage_DelayNobody) {
  static const char words[] = "GET / HTTP/1.0\r\nHost: somewhere.example\r\nAccept: */*\r\n\r\n";
  const strangers_t strangers = {.count = MANY, .words = words, .num_words = sizeof words};
  do_not_delay(&strangers);
}

/* ---- where a rank listens ---------------------------------------------------------------------------------------- */

TEST(TcpStart_NamedInterface_OnlyItIsListenedOn) {
  tcp_rank_t ranks[2] = {{.interfaces = "nosuch0,lo", .then = tcp_ranks_exchange},
                         {.interfaces = "nosuch0,lo", .then = tcp_ranks_exchange}};
  strangers_t nobody = {.count = 0};
  run_with(&nobody, ranks, 2);
  all_are_well(ranks, 2);
  assert_in_range(nobody.num_listeners, 1, MOST_LISTENERS);
  for (int32_t i = 0; i < nobody.num_listeners; ++i) {
    struct sockaddr_in in;
    memcpy(&in, &nobody.listeners[i], sizeof in);
    const int is_v4 = in.sin_family == AF_INET;
    assert_true(is_v4 ? ntohl(in.sin_addr.s_addr) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(&nobody.listeners[i].sin6_addr));
  }
}
