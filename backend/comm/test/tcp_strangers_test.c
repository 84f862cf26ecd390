// SPDX-License-Identifier: Apache-2.0
/* Strangers neither prevent nor delay a start, and none of them is accepted: idle and slow ones, strangers that send
 * arbitrary data, and strangers that replay data of a rank. */

#include "backend/comm/test/tcp_detour.h"
#include "backend/comm/test/tcp_strangers.h"
#include "third_party/bazel/test.h"

enum { WORLD = 3, MANY = 200, TURNS = 3, GREETING_BYTES = 32, PROOF_BYTES = 16 };

#define SECOND_NS UINT64_C(1000000000)

static void all_are_well(const tcp_rank_t* ranks, int32_t world_size) {
  for (int32_t r = 0; r < world_size; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %d, %s", r, ranks[r].status, ranks[r].why.message);
  }
}

/* The best of three turns, since the machine may be busy. */
static uint64_t best_start_ns(const tcp_strangers_t* strangers) {
  uint64_t best_ns = UINT64_MAX;
  for (int turn = 0; turn < TURNS; ++turn) {
    tcp_rank_t ranks[WORLD] = {
        {.then = tcp_ranks_exchange}, {.then = tcp_ranks_exchange}, {.then = tcp_ranks_exchange}};
    tcp_strangers_t own = *strangers;
    const uint64_t took_ns = tcp_strangers_run(&own, ranks, WORLD);
    all_are_well(ranks, WORLD);
    if (took_ns < best_ns) best_ns = took_ns;
  }
  return best_ns;
}

static void do_not_delay(const tcp_strangers_t* strangers) {
  static const tcp_strangers_t none = {.count = 0};
  const uint64_t clean_ns = best_start_ns(&none), with_ns = best_start_ns(strangers);
  print_message("started in %.3f s, without strangers in %.3f s\n", (double)with_ns / 1e9, (double)clean_ns / 1e9);
  assert_true(with_ns < clean_ns + SECOND_NS);
}

TEST(TcpStart_IdleStrangers_DelayNobody) {
  const tcp_strangers_t strangers = {.count = MANY};
  do_not_delay(&strangers);
}

/* The bytes begin as a rank's greeting does, so rank 0 cannot reject them early. */
TEST(TcpStart_StrangersOfAByteASecond_DelayNobody) {
  char greeting[GREETING_BYTES] = "sluicet2";
  const int32_t from_1_to_0[] = {1, 0};
  memcpy(greeting + 8, from_1_to_0, sizeof from_1_to_0);
  const tcp_strangers_t strangers = {.count = MANY, .words = greeting, .num_words = sizeof greeting, .is_slow = 1};
  do_not_delay(&strangers);
}

TEST(TcpStart_StrangersThatTalkGarbage_DelayNobody) {
  static const char words[] = "GET / HTTP/1.0\r\nHost: somewhere.example\r\nAccept: */*\r\n\r\n";
  const tcp_strangers_t strangers = {.count = MANY, .words = words, .num_words = sizeof words};
  do_not_delay(&strangers);
}

/* ---- a hello of another job -------------------------------------------------------------------------------------- */

TEST(TcpStart_HelloOfAnotherJobReplayed_IsRefused) {
  tcp_rank_t first[2] = {{.then = tcp_ranks_exchange}, {.then = tcp_ranks_exchange}};
  tcp_rank_t second[2] = {{.then = tcp_ranks_exchange}, {.then = tcp_ranks_exchange}};
  tcp_detour_t detour = {.kind = DETOUR_RECORDS};
  tcp_detour_run(&detour, first);
  all_are_well(first, 2);
  assert_true(detour.num_recorded >= GREETING_BYTES + PROOF_BYTES);
  tcp_strangers_t strangers = {.count = 1, .words = detour.recorded, .num_words = GREETING_BYTES + PROOF_BYTES};
  const uint64_t took_ns = tcp_strangers_run(&strangers, second, 2);
  all_are_well(second, 2);
  assert_true(took_ns < 10 * SECOND_NS); /* far from the 30 s after which the start would fail */
  /* The replay got answers like any greeting, but was not accepted. */
  assert_int_equal(strangers.num_heard, 2 * PROOF_BYTES);
}

/* ---- where a rank listens ---------------------------------------------------------------------------------------- */

TEST(TcpStart_NamedInterface_OnlyItIsListenedOn) {
  tcp_rank_t ranks[2] = {{.interfaces = "nosuch0,lo", .then = tcp_ranks_exchange},
                         {.interfaces = "nosuch0,lo", .then = tcp_ranks_exchange}};
  tcp_strangers_t nobody = {.count = 0};
  tcp_strangers_run(&nobody, ranks, 2);
  all_are_well(ranks, 2);
  assert_in_range(nobody.num_listeners, 1, 16);
  for (int32_t i = 0; i < nobody.num_listeners; ++i) {
    struct sockaddr_in in;
    memcpy(&in, &nobody.listeners[i], sizeof in);
    const int is_v4 = in.sin_family == AF_INET;
    assert_true(is_v4 ? ntohl(in.sin_addr.s_addr) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(&nobody.listeners[i].sin6_addr));
  }
}
