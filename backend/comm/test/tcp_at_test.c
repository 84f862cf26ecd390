// SPDX-License-Identifier: Apache-2.0
/* Ranks that connect with an address and a secret only. They find each other in any order, and a mismatch fails on all
 * ranks, with an error that names the rank at fault. Ranks are threads. */
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/base/test/refused.h"
#include "backend/comm/comm.h"
#include "backend/comm/test/tcp_place.h"

enum { MAX_RANKS = 4, MANY = 300, MAX_RECORDED = 1 << 16 };

#define SECOND_NS UINT64_C(1000000000)

static const char other_secret[] = "a secret of nobody else";

typedef struct at_rank_s {
  int32_t rank, world_size;
  const char* addresses;
  const char* secret; /* NULL: tcp_place_secret */
  uint64_t connect_timeout_ns;
  useconds_t later_us;
  pthread_t thread;
  sluice_comm_t* comm;
  sluice_status_t status;
  sluice_error_info_t why;
} at_rank_t;

static void create(at_rank_t* me) {
  DEFAULTS(sluice_comm_config, config);
  DEFAULTS(sluice_tcp_config, tcp);
  const char* secret = me->secret != NULL ? me->secret : tcp_place_secret;
  config.rank = me->rank;
  config.world_size = me->world_size;
  config.timeout_ns = 60 * SECOND_NS;
  tcp.connect_timeout_ns = me->connect_timeout_ns;
  me->status = sluice_comm_create_tcp_at(&config, me->addresses, secret, strlen(secret), &tcp, &me->comm);
  sluice_error_info_init(&me->why, sizeof me->why);
  if (me->status != SLUICE_OK) sluice_error_last(&me->why);
}

/* Creates the communicator and sums over it. */
static void* run_rank(void* data) {
  at_rank_t* me = data;
  if (me->later_us > 0) usleep(me->later_us);
  create(me);
  int64_t sum = me->rank + 1;
  if (me->status == SLUICE_OK) {
    me->status = sluice_comm_all_reduce_i64(me->comm, &sum, 1, SLUICE_REDUCE_SUM, "a sum of the test");
    if (me->status == SLUICE_OK && sum != me->world_size * (me->world_size + 1) / 2) me->status = SLUICE_E_INTERNAL;
  }
  sluice_comm_destroy(me->comm);
  return NULL;
}

static void run(at_rank_t* ranks, int32_t count) {
  for (int32_t i = 0; i < count; ++i) assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
  for (int32_t i = 0; i < count; ++i) pthread_join(ranks[i].thread, NULL);
}

/* `count` ranks with the same settings. */
static void fill(at_rank_t* ranks, int32_t count, const char* addresses, uint64_t timeout_ns) {
  memset(ranks, 0, (size_t)count * sizeof *ranks);
  for (int32_t i = 0; i < count; ++i) {
    ranks[i] = (at_rank_t){.rank = i, .world_size = count, .addresses = addresses, .connect_timeout_ns = timeout_ns};
  }
}

static char meeting[TCP_PLACE_BYTES]; /* where gathered ranks meet */

/* The same at a place of their own. */
static void gather(at_rank_t* ranks, int32_t count, uint64_t timeout_ns) {
  tcp_place_init(meeting);
  fill(ranks, count, meeting, timeout_ns);
}

static void assert_well(const at_rank_t* ranks, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    if (ranks[i].status != SLUICE_OK) fail_msg("rank %d: %d, %s", i, ranks[i].status, ranks[i].why.message);
  }
}

static void assert_refused(const at_rank_t* rank, sluice_status_t status, int32_t peer, const char* words) {
  if (rank->status != status || rank->why.peer != peer || strstr(rank->why.message, words) == NULL) {
    fail_msg("rank %d: %s, peer %d: \"%s\", and not %s, peer %d: \"%s\"", rank->rank, sluice_status_name(rank->status),
             rank->why.peer, rank->why.message, sluice_status_name(status), peer, words);
  }
  assert_null(rank->comm);
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

TEST(At_OneAddress_RanksMeetInAnyOrder) {
  for (int32_t count = 1; count <= MAX_RANKS; ++count) {
    char place[TCP_PLACE_BYTES];
    at_rank_t ranks[MAX_RANKS];
    tcp_place_init(place);
    for (int turn = 0; turn < 2; ++turn) { /* the second turn reuses the port at once */
      fill(ranks, count, place, 60 * SECOND_NS);
      ranks[0].later_us = turn == 0 ? 0 : 300000;
      run(ranks, count);
      assert_well(ranks, count);
    }
  }
}

TEST(At_AListOfAddresses_RanksListenThere) {
  char list[MAX_RANKS * TCP_PLACE_BYTES] = "localhost:";
  at_rank_t ranks[MAX_RANKS];
  for (int32_t r = 0; r < MAX_RANKS; ++r) {
    char place[TCP_PLACE_BYTES];
    tcp_place_init(place);
    /* rank 0 listens on all addresses of a name */
    strcat(list, r == 0 ? strchr(place, ':') + 1 : place);
    if (r + 1 < MAX_RANKS) strcat(list, ",");
  }
  fill(ranks, MAX_RANKS, list, 60 * SECOND_NS);
  run(ranks, MAX_RANKS);
  assert_well(ranks, MAX_RANKS);
}

/* Rank 1 gives up before rank 2 has come, and is started again. */
TEST(At_RankStartedAgain_MayJoin) {
  at_rank_t ranks[3];
  gather(ranks, 3, 60 * SECOND_NS);
  at_rank_t first = ranks[1];
  first.connect_timeout_ns = SECOND_NS / 5;
  assert_int_equal(pthread_create(&ranks[0].thread, NULL, run_rank, &ranks[0]), 0);
  create(&first);
  /* If rank 0 did not listen yet, rank 1 reports rank 0. */
  if (first.status != SLUICE_E_EXTERNAL) assert_refused(&first, SLUICE_E_TIMED_OUT, 2, "rank 2 did not connect");
  for (int32_t i = 1; i < 3; ++i) assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
  for (int32_t i = 0; i < 3; ++i) pthread_join(ranks[i].thread, NULL);
  assert_well(ranks, 3);
}

/* ---- what does not fit ------------------------------------------------------------------------------------------- */

TEST(At_AnotherSecret_FailsOnAllRanksNamingIt) {
  at_rank_t ranks[3];
  gather(ranks, 3, 2 * SECOND_NS);
  ranks[1].secret = other_secret;
  ranks[0].connect_timeout_ns = 3 * SECOND_NS; /* so that rank 1 reaches rank 0 */
  run(ranks, 3);
  assert_refused(&ranks[1], SLUICE_E_MISMATCH, 0, "does not have the same secret");
  assert_refused(&ranks[0], SLUICE_E_TIMED_OUT, 1, "claims to be rank 1 has another secret");
  assert_refused(&ranks[2], SLUICE_E_TIMED_OUT, 1, "rank 1 did not connect");
  for (int32_t i = 0; i < 3; ++i) {
    assert_null(strstr(ranks[i].why.message, tcp_place_secret));
    assert_null(strstr(ranks[i].why.message, other_secret));
  }
}

/* A difference in the last byte, or in the length, is another secret. */
TEST(At_NearlyTheSameSecret_IsAnother) {
  static const char* const secrets[][2] = {{"0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdeF"},
                                           {"0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcde"},
                                           {"0123456789abcdef", "0123456789abcdeF"}};
  for (size_t i = 0; i < sizeof secrets / sizeof *secrets; ++i) {
    at_rank_t ranks[2];
    gather(ranks, 2, 2 * SECOND_NS);
    for (int32_t r = 0; r < 2; ++r) ranks[r].secret = secrets[i][r];
    run(ranks, 2);
    assert_refused(&ranks[1], SLUICE_E_MISMATCH, 0, "does not have the same secret");
    assert_refused(&ranks[0], SLUICE_E_TIMED_OUT, 1, "another secret");
  }
}

TEST(At_AnotherWorldSize_FailsOnAllRanksNamingIt) {
  for (int32_t wrong = 2; wrong <= 4; wrong += 2) {
    at_rank_t ranks[3];
    gather(ranks, 3, 60 * SECOND_NS);
    const int32_t odd = wrong == 2 ? 1 : 2;
    ranks[odd].world_size = wrong;
    ranks[3 - odd].later_us = 200000; /* this rank gets the error although it comes later */
    run(ranks, 3);
    for (int32_t i = 0; i < 3; ++i) assert_refused(&ranks[i], SLUICE_E_MISMATCH, odd, "was started with world_size");
  }
}

TEST(At_ARankTwice_FailsOnAllRanksNamingIt) {
  at_rank_t ranks[MAX_RANKS];
  gather(ranks, MAX_RANKS, 60 * SECOND_NS);
  ranks[2].rank = 1;
  ranks[3].later_us = 200000;
  run(ranks, MAX_RANKS);
  for (int32_t i = 0; i < MAX_RANKS; ++i)
    assert_refused(&ranks[i], SLUICE_E_MISMATCH, 1, "two processes claim to be rank 1");
}

TEST(At_Rank0Twice_RefusesTheSecondAlone) {
  at_rank_t ranks[3];
  gather(ranks, 3, 60 * SECOND_NS);
  ranks[1].later_us = 3000000; /* so that the second rank 0 comes before the group is complete */
  at_rank_t second = ranks[0];
  for (int32_t i = 0; i < 3; ++i) assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
  usleep(1000000);
  create(&second);
  for (int32_t i = 0; i < 3; ++i) pthread_join(ranks[i].thread, NULL);
  assert_refused(&second, SLUICE_E_EXTERNAL, -1, "a second process with this rank, or an earlier run?");
  assert_well(ranks, 3);
}

TEST(At_AMissingRank_FailsOnAllRanksNamingIt) {
  for (int32_t missing = 0; missing < 3; ++missing) {
    at_rank_t ranks[3];
    gather(ranks, 3, SECOND_NS);
    for (int32_t i = missing; i < 2; ++i) ranks[i].rank = i + 1;
    run(ranks, 2);
    for (int32_t i = 0; i < 2; ++i) {
      if (missing == 0) assert_refused(&ranks[i], SLUICE_E_EXTERNAL, 0, "cannot reach rank 0 at 127.");
      if (missing > 0) assert_refused(&ranks[i], SLUICE_E_TIMED_OUT, missing, "2 of 3 ranks did");
    }
  }
}

TEST(At_BadArguments_SayWhatToGive) {
  static const struct {
    const char *addresses, *secret, *interfaces;
    sluice_status_t status;
    const char* words;
  } cases[] = {
      {NULL, NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "addresses is NULL"},
      {"", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "addresses is empty"},
      {"10.0.0.1", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "\"10.0.0.1\" of rank 0 is not a \"host:port\""},
      {"10.0.0.1:", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "not a \"host:port\""},
      {":29500", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "not a \"host:port\""},
      {"10.0.0.1:0", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "from 1 to 65535"},
      {"10.0.0.1:65536", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "from 1 to 65535"},
      {"10.0.0.1:29x", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "not a \"host:port\""},
      {"::1:29500", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "\"[host]:port\""},
      {"[]:29500", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "not a \"host:port\""},
      {"10.0.0.1:1,10.0.0.1:2", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "2 entries for 3 ranks"},
      {"10.0.0.1:1,,10.0.0.1:2", NULL, NULL, SLUICE_E_INVALID_ARGUMENT, "of rank 1"},
      {"10.0.0.1:1", "fifteen bytes..", NULL, SLUICE_E_INVALID_ARGUMENT, "secret has 15 bytes"},
      {"127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", NULL, "lo", SLUICE_E_INVALID_ARGUMENT, "interfaces"},
      {"no-such-host.invalid:29500", NULL, NULL, SLUICE_E_NOT_FOUND, "\"no-such-host.invalid:29500\""},
      {"192.0.2.1:29500", NULL, NULL, SLUICE_E_EXTERNAL, "an address of the machine that this rank runs on"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    sluice_comm_config_t config;
    sluice_tcp_config_t tcp;
    sluice_comm_t* comm = (sluice_comm_t*)&config;
    const char* secret = cases[i].secret != NULL ? cases[i].secret : tcp_place_secret;
    sluice_comm_config_init(&config, sizeof config);
    sluice_tcp_config_init(&tcp, sizeof tcp);
    config.world_size = 3;
    tcp.interfaces = cases[i].interfaces;
    tcp.connect_timeout_ns = SECOND_NS;
    const sluice_status_t status =
        sluice_comm_create_tcp_at(&config, cases[i].addresses, secret, strlen(secret), &tcp, &comm);
    if (status != cases[i].status || strstr(last_message(), cases[i].words) == NULL) {
      fail_msg("case %d: %s: %s", (int)i, sluice_status_name(status), last_message());
    }
    assert_null(comm);
  }
}

/* ---- strangers --------------------------------------------------------------------------------------------------- */

static void place_of(const char* place, struct sockaddr_in* out) {
  char host[TCP_PLACE_BYTES];
  snprintf(host, sizeof host, "%.*s", (int)strcspn(place, ":"), place);
  *out = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(strchr(place, ':') + 1))};
  assert_int_equal(inet_pton(AF_INET, host, &out->sin_addr), 1);
}

static int reach(const char* place) {
  struct sockaddr_in at;
  place_of(place, &at);
  for (;;) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (connect(fd, (struct sockaddr*)&at, sizeof at) == 0) return fd;
    close(fd);
    usleep(1000);
  }
}

TEST(At_IdleStrangers_DoNotPreventIt) {
  char place[TCP_PLACE_BYTES];
  at_rank_t ranks[3];
  int strangers[MANY];
  tcp_place_init(place);
  fill(ranks, 3, place, 60 * SECOND_NS);
  assert_int_equal(pthread_create(&ranks[0].thread, NULL, run_rank, &ranks[0]), 0);
  for (int i = 0; i < MANY; ++i) strangers[i] = reach(place);
  for (int32_t i = 1; i < 3; ++i) assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
  for (int32_t i = 0; i < 3; ++i) pthread_join(ranks[i].thread, NULL);
  for (int i = 0; i < MANY; ++i) close(strangers[i]);
  assert_well(ranks, 3);
}

/* A proxy between rank 1 and rank 0 that records all bytes. */
typedef struct wire_tap_s {
  const char* place; /* rank 0's address */
  int listener;
  pthread_mutex_t mutex;
  size_t num_heard;
  char heard[MAX_RECORDED]; /* on all connections, in both directions */
} wire_tap_t;

typedef struct leg_s {
  wire_tap_t* tap;
  int ends[2]; /* towards rank 1 and rank 0 */
  size_t num_said;
  char said[MAX_RECORDED]; /* bytes from rank 1 */
} leg_t;

static void write_down(char* to, size_t* used, const char* bytes, size_t count) {
  assert_true(*used + count <= MAX_RECORDED);
  memcpy(to + *used, bytes, count);
  *used += count;
}

static void* run_leg(void* data) {
  leg_t* leg = data;
  leg->ends[0] = accept(leg->tap->listener, NULL, NULL);
  leg->ends[1] = reach(leg->tap->place);
  struct pollfd polls[] = {{.fd = leg->ends[0], .events = POLLIN}, {.fd = leg->ends[1], .events = POLLIN}};
  for (int open = 2; open > 0;) {
    char bytes[4096];
    if (poll(polls, 2, -1) <= 0) continue;
    for (int i = 0; i < 2; ++i) {
      const ssize_t n = polls[i].fd >= 0 && polls[i].revents != 0 ? recv(polls[i].fd, bytes, sizeof bytes, 0) : -2;
      if (n == -2) continue;
      if (n <= 0) {
        shutdown(leg->ends[1 - i], SHUT_WR);
        polls[i].fd = -1;
        --open;
        continue;
      }
      (void)send(leg->ends[1 - i], bytes, (size_t)n, MSG_NOSIGNAL);
      if (i == 0) write_down(leg->said, &leg->num_said, bytes, (size_t)n);
      pthread_mutex_lock(&leg->tap->mutex);
      write_down(leg->tap->heard, &leg->tap->num_heard, bytes, (size_t)n);
      pthread_mutex_unlock(&leg->tap->mutex);
    }
  }
  for (int i = 0; i < 2; ++i) close(leg->ends[i]);
  return NULL;
}

static int listen_at(const char* place) {
  struct sockaddr_in at;
  place_of(place, &at);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(bind(fd, (struct sockaddr*)&at, sizeof at), 0);
  assert_int_equal(listen(fd, 8), 0);
  return fd;
}

/* Records two connections: the rendezvous, and the connection that stays. */
TEST(At_WhatIsSeenOnTheWire_HasNoSecretAndJoinsNoGroup) {
  char place[TCP_PLACE_BYTES], between[TCP_PLACE_BYTES];
  at_rank_t ranks[2];
  pthread_t threads[2];
  leg_t* legs = calloc(2, sizeof *legs);
  wire_tap_t* tap = calloc(1, sizeof *tap);
  tcp_place_init(place);
  tcp_place_init(between);
  pthread_mutex_init(&tap->mutex, NULL);
  tap->place = place;
  tap->listener = listen_at(between);
  for (int i = 0; i < 2; ++i) {
    legs[i].tap = tap;
    assert_int_equal(pthread_create(&threads[i], NULL, run_leg, &legs[i]), 0);
  }
  fill(ranks, 2, place, 60 * SECOND_NS);
  ranks[1].addresses = between;
  run(ranks, 2);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  assert_well(ranks, 2);
  assert_true(tap->num_heard > 100);
  for (size_t at = 0; at + 8 <= strlen(tcp_place_secret); ++at) {
    assert_null(memmem(tap->heard, tap->num_heard, tcp_place_secret + at, 8));
  }
  /* A stranger that replays rank 1's bytes does not join a later group. */
  fill(ranks, 2, place, SECOND_NS);
  assert_int_equal(pthread_create(&ranks[0].thread, NULL, run_rank, &ranks[0]), 0);
  int strangers[2];
  for (int i = 0; i < 2; ++i) {
    strangers[i] = reach(place);
    (void)send(strangers[i], legs[i].said, legs[i].num_said, MSG_NOSIGNAL);
  }
  pthread_join(ranks[0].thread, NULL);
  assert_refused(&ranks[0], SLUICE_E_TIMED_OUT, 1, "1 of 2 ranks did");
  for (int i = 0; i < 2; ++i) close(strangers[i]);
  close(tap->listener);
  free(legs);
  free(tap);
}
