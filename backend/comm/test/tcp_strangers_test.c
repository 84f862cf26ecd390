// SPDX-License-Identifier: Apache-2.0
/* Strangers neither prevent nor delay a start, and none of them is accepted: idle and slow ones, and strangers that
 * send arbitrary data. */
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/comm/tcp/tcp_listen.h"
#include "backend/comm/test/tcp_ranks.h"
#include "third_party/bazel/test.h"

enum { WORLD = 3, MANY = 200, TURNS = 3, GREETING_BYTES = 32 };

#define SECOND_NS UINT64_C(1000000000)

/* Connections from outside of the job, which stay. */
typedef struct strangers_s {
  int32_t count;
  const void* words; /* each stranger sends them at once, or one byte per second */
  size_t num_words;
  int is_slow;
} strangers_t;

static strangers_t strangers;
static int fds[MANY];
static pthread_t talker;
static _Atomic int is_over;
static struct sockaddr_in6 listeners[SLUICE_TCP_MAX_ADDRESSES]; /* rank 0's */
static int32_t num_listeners;

static int come(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const struct sockaddr_in loopback = {
      .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (fd < 0 || connect(fd, (const struct sockaddr*)&loopback, sizeof loopback) != 0) abort();
  if (!strangers.is_slow) (void)send(fd, strangers.words, strangers.num_words, MSG_NOSIGNAL);
  return fd;
}

static void* talk_slowly(void* unused) {
  for (size_t word = 0; word < strangers.num_words && !is_over; ++word) {
    for (int32_t i = 0; i < strangers.count; ++i) {
      (void)send(fds[i], (const char*)strangers.words + word, 1, MSG_NOSIGNAL);
    }
    for (int i = 0; i < 100 && !is_over; ++i) usleep(10000);
  }
  return unused;
}

/* The strangers come as soon as rank 0 listens, before the other ranks know its address. */
sluice_status_t __real_sluice_tcp_listen(int32_t rank, int is_named, sluice_tcp_card_t* card,
                                         sluice_tcp_listeners_t* out_listeners);
sluice_status_t __wrap_sluice_tcp_listen(int32_t rank, int is_named, sluice_tcp_card_t* card,
                                         sluice_tcp_listeners_t* out_listeners);
sluice_status_t __wrap_sluice_tcp_listen(int32_t rank, int is_named, sluice_tcp_card_t* card,
                                         sluice_tcp_listeners_t* out_listeners) {
  SLUICE_TRY(__real_sluice_tcp_listen(rank, is_named, card, out_listeners));
  if (rank != 0) return SLUICE_OK;
  num_listeners = out_listeners->count;
  for (int32_t i = 0; i < num_listeners; ++i) {
    socklen_t length = sizeof listeners[i];
    if (getsockname(out_listeners->fds[i], (struct sockaddr*)&listeners[i], &length) != 0) abort();
  }
  for (int32_t i = 0; i < strangers.count; ++i) fds[i] = come(card->any_port);
  if (strangers.is_slow && pthread_create(&talker, NULL, talk_slowly, NULL) != 0) abort();
  return SLUICE_OK;
}

/* Runs the ranks, which exchange a small message. Returns the longest time that one took to create its communicator. */
static uint64_t run_with(const strangers_t* with, int32_t world_size, const char* interfaces) {
  tcp_rank_t ranks[WORLD];
  uint64_t longest_ns = 0;
  strangers = *with;
  is_over = 0;
  for (int32_t r = 0; r < world_size; ++r)
    ranks[r] = (tcp_rank_t){.interfaces = interfaces, .then = tcp_ranks_exchange};
  tcp_ranks_run(ranks, world_size);
  is_over = 1;
  if (strangers.is_slow) pthread_join(talker, NULL);
  for (int32_t i = 0; i < strangers.count; ++i) close(fds[i]);
  for (int32_t r = 0; r < world_size; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %d, %s", r, ranks[r].status, ranks[r].why.message);
    if (ranks[r].created_ns > longest_ns) longest_ns = ranks[r].created_ns;
  }
  return longest_ns;
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

/* The best of three turns, since the machine may be busy. */
static uint64_t best_start_ns(const strangers_t* with) {
  uint64_t best_ns = UINT64_MAX;
  for (int turn = 0; turn < TURNS; ++turn) {
    const uint64_t took_ns = run_with(with, WORLD, NULL);
    if (took_ns < best_ns) best_ns = took_ns;
  }
  return best_ns;
}

static void do_not_delay(const strangers_t* with) {
  static const strangers_t none = {.count = 0};
  const uint64_t clean_ns = best_start_ns(&none), with_ns = best_start_ns(with);
  print_message("started in %.3f s, without strangers in %.3f s\n", (double)with_ns / 1e9, (double)clean_ns / 1e9);
  assert_true(with_ns < clean_ns + SECOND_NS);
}

TEST(TcpStart_IdleStrangers_DelayNobody) {
  const strangers_t with = {.count = MANY};
  do_not_delay(&with);
}

/* The bytes begin as a rank's greeting does, so rank 0 cannot reject them early. */
TEST(TcpStart_StrangersOfAByteASecond_DelayNobody) {
  char greeting[GREETING_BYTES] = "sluicet2";
  const int32_t from_1_to_0[] = {1, 0};
  memcpy(greeting + 8, from_1_to_0, sizeof from_1_to_0);
  const strangers_t with = {.count = MANY, .words = greeting, .num_words = sizeof greeting, .is_slow = 1};
  do_not_delay(&with);
}

TEST(TcpStart_StrangersThatTalkGarbage_DelayNobody) {
  static const char words[] = "GET / HTTP/1.0\r\nHost: somewhere.example\r\nAccept: */*\r\n\r\n";
  const strangers_t with = {.count = MANY, .words = words, .num_words = sizeof words};
  do_not_delay(&with);
}

/* ---- where a rank listens ---------------------------------------------------------------------------------------- */

TEST(TcpStart_NamedInterface_OnlyItIsListenedOn) {
  static const strangers_t nobody = {.count = 0};
  (void)run_with(&nobody, 2, "nosuch0,lo");
  assert_in_range(num_listeners, 1, SLUICE_TCP_MAX_ADDRESSES);
  for (int32_t i = 0; i < num_listeners; ++i) {
    struct sockaddr_in in;
    memcpy(&in, &listeners[i], sizeof in);
    const int is_v4 = in.sin_family == AF_INET;
    assert_true(is_v4 ? ntohl(in.sin_addr.s_addr) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(&listeners[i].sin6_addr));
  }
}
