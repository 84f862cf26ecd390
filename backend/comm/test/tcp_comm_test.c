// SPDX-License-Identifier: Apache-2.0
/* Tests of the tcp transport beyond the suite in //backend/cts/comm: how a failure of one rank reaches the others, and
 * that the parent stays usable. Ranks are threads that connect through the local transport. */
#include <arpa/inet.h>
#include <errno.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/comm/comm.h"
#include "backend/comm/tcp/tcp_address.h"
#include "backend/comm/tcp/tcp_mac.h"
#include "backend/comm/test/tcp_ranks.h"
#include "third_party/bazel/test.h"

enum { WORLD = 3 };

#define SECOND_NS UINT64_C(1000000000)

/* ---- cases ------------------------------------------------------------------------------------------------------- */

TEST(TcpCreate_OneRankWithoutInterface_FailsOnAllAndTheParentWorksOn) {
  tcp_rank_t ranks[WORLD] = {{.interfaces = NULL}, {.interfaces = "nosuch0,nosuch1"}, {.interfaces = NULL}};
  tcp_ranks_run(ranks, WORLD);
  assert_int_equal(ranks[1].status, SLUICE_E_NOT_FOUND);
  assert_non_null(strstr(ranks[1].why.message, "\"nosuch0,nosuch1\""));
  assert_non_null(strstr(ranks[1].why.message, "lo")); /* the message lists existing interfaces */
  for (int32_t r = 0; r < WORLD; ++r) {
    assert_null(ranks[r].comm);
    assert_int_equal(ranks[r].again, SLUICE_OK);
    if (r == 1) continue;
    assert_int_equal(ranks[r].status, SLUICE_E_PEER_REFUSED);
    assert_int_equal(ranks[r].why.peer, 1);
  }
}

/* From now on, each connection of this process passes on as few bytes at a time as possible, like a slow link. */
static void slow_down(void) {
  for (int fd = 3; fd < 1024; ++fd) {
    const int few = 1; /* the kernel's minimum */
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof peer;
    if (getpeername(fd, (struct sockaddr*)&peer, &bytes) == 0 && peer.ss_family != AF_UNIX) {
      (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &few, sizeof few);
    }
  }
}

static uint64_t large_sizes[] = {
    1, 16383, 16384, 16385, 262143, 262144, 262145, 1 << 20, (1 << 20) + 16385, (4 << 20) + 5};
static int64_t largest_wakes; /* how often rank 0 slept while the largest message arrived */

static unsigned char pattern(uint64_t at, uint64_t bytes) { return (unsigned char)(at * 31 + (at >> 12) + bytes); }

/* Sends from rank 1 to rank 0; other ranks do not take part. */
static void send_large(tcp_rank_t* me, uint64_t bytes) {
  unsigned char* block = malloc(bytes);
  const void* send[WORLD] = {block};
  void* recv[WORLD] = {NULL, block};
  const uint64_t sent[WORLD] = {me->rank == 1 ? bytes : 0}, received[WORLD] = {0, me->rank == 0 ? bytes : 0};
  const sluice_exchange_t exchange = {.send = send, .send_bytes = sent, .recv = recv, .recv_bytes = received};
  struct rusage before, after;
  sluice_comm_request_t* request;
  for (uint64_t i = 0; i < bytes; ++i) block[i] = me->rank == 1 ? pattern(i, bytes) : 0;
  getrusage(RUSAGE_THREAD, &before);
  me->status = sluice_comm_exchange_start(me->comm, &exchange, &request);
  if (me->status == SLUICE_OK) me->status = sluice_comm_exchange_wait(me->comm, request, NULL);
  getrusage(RUSAGE_THREAD, &after);
  if (me->rank == 0) largest_wakes = after.ru_nvcsw - before.ru_nvcsw;
  for (uint64_t i = 0; i < bytes && me->rank == 0 && me->status == SLUICE_OK; ++i) {
    if (block[i] != pattern(i, bytes)) me->status = SLUICE_E_INTERNAL;
  }
  if (me->status != SLUICE_OK) sluice_error_last(&me->why);
  free(block);
}

static void exchange_large(tcp_rank_t* me) {
  if (me->rank == 0) slow_down();
  for (size_t i = 0; i < sizeof large_sizes / sizeof *large_sizes && me->status == SLUICE_OK; ++i) {
    if (me->rank < 2) send_large(me, large_sizes[i]);
  }
}

/* 4 MiB are 17 times WAKE_BYTES, and 64 times what loopback passes on at once. A rank that is slower than the
 * connection (with a sanitizer) never sleeps. */
TEST(TcpWait_LargeMessageOverASlowConnection_ArrivesIntactAndWakesSeldom) {
  tcp_rank_t ranks[WORLD];
  for (int32_t r = 0; r < WORLD; ++r) ranks[r] = (tcp_rank_t){.then = exchange_large};
  tcp_ranks_run(ranks, WORLD);
  for (int32_t r = 0; r < WORLD; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r].why.message);
  }
  assert_in_range(largest_wakes, 0, 48);
}

static void last_dies_and_second_gives_up(tcp_rank_t* me) {
  if (me->rank == 2) sluice_comm_abort(me->comm); /* without a notice to the peers */
  tcp_ranks_meet(me);
  if (me->rank == 1) {
    tcp_ranks_exchange(me);
    sluice_comm_destroy(me->comm);
    me->comm = NULL;
  }
  tcp_ranks_meet(me);
  if (me->rank == 0) tcp_ranks_exchange(me);
}

/* Rank 0 finds both connections ended, first that of rank 1, which gave up because rank 2 was lost. */
TEST(TcpWait_AnotherGaveUpForALostRank_BlamesTheLostOne) {
  tcp_rank_t ranks[WORLD];
  for (int32_t r = 0; r < WORLD; ++r) ranks[r] = (tcp_rank_t){.then = last_dies_and_second_gives_up};
  tcp_ranks_run(ranks, WORLD);
  for (int32_t r = 0; r < 2; ++r) {
    assert_int_equal(ranks[r].status, SLUICE_E_PEER_LOST);
    if (ranks[r].why.peer != 2) fail_msg("rank %d blames rank %d: %s", r, ranks[r].why.peer, ranks[r].why.message);
  }
}

/* ---- what one rank lacks ----------------------------------------------------------------------------------------- */

/* Runs in a child process with its own limit, which leaves descriptors for listening but not for all connections. */
static int connect_without_descriptors(void) {
  enum { RANKS = 4, PREPARED = 3 * RANKS, FEW = 5 };
  tcp_rank_t ranks[RANKS];
  const int first_free = dup(0);
  const struct rlimit few = {.rlim_cur = (rlim_t)first_free + PREPARED + FEW,
                             .rlim_max = (rlim_t)first_free + PREPARED + FEW};
  close(first_free);
  if (setrlimit(RLIMIT_NOFILE, &few) != 0) return 1;
  for (int32_t r = 0; r < RANKS; ++r) ranks[r] = (tcp_rank_t){.connect_timeout_ns = 2 * SECOND_NS};
  tcp_ranks_run(ranks, RANKS);
  int num_short = 0;
  for (int32_t r = 0; r < RANKS; ++r) {
    if (ranks[r].status == SLUICE_OK) return 2;
    fprintf(stderr, "rank %d: %s\n", r, ranks[r].why.message);
    num_short += ranks[r].status == SLUICE_E_EXTERNAL && ranks[r].why.native_code == EMFILE &&
                 strstr(ranks[r].why.message, "no descriptor left") != NULL;
    if (ranks[r].again != SLUICE_OK) return 3;
  }
  return num_short > 0 ? 0 : 4;
}

TEST(TcpCreate_NoDescriptorsLeft_SaysSo) {
  int code = -1;
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) _exit(connect_without_descriptors());
  assert_int_equal(waitpid(child, &code, 0), child);
  assert_int_equal(code, 0);
}

TEST(TcpCreate_BadArguments_AreRefused) {
  sluice_local_group_t* group;
  DEFAULTS(sluice_comm_config, config);
  sluice_comm_t *parent, *comm;
  DEFAULTS(sluice_tcp_config, tcp);
  assert_int_equal(sluice_local_group_create(1, &group), SLUICE_OK);
  assert_int_equal(sluice_comm_create_local(group, &config, &parent), SLUICE_OK);
  assert_int_equal(sluice_comm_create_tcp(parent, NULL, NULL), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_comm_create_tcp(NULL, NULL, &comm), SLUICE_E_INVALID_ARGUMENT);
  tcp.struct_size = 3;
  assert_int_equal(sluice_comm_create_tcp(parent, &tcp, &comm), SLUICE_E_ABI);
  sluice_tcp_config_init(&tcp, sizeof tcp);
  const sluice_ext_header_t unknown = {.type = 77};
  tcp.next = &unknown;
  assert_int_equal(sluice_comm_create_tcp(parent, &tcp, &comm), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_comm_create_tcp(parent, NULL, &comm), SLUICE_OK); /* one rank, with defaults */
  assert_string_equal(sluice_comm_name(comm), "tcp");
  sluice_comm_destroy(comm);
  sluice_comm_destroy(parent);
  sluice_local_group_destroy(group);
}

/* ---- addresses --------------------------------------------------------------------------------------------------- */

TEST(TcpCard_Targets_AreLoopbackWhereThePlaceIsTheSame) {
  sluice_tcp_card_t mine = {.place = {1}}, theirs = {.place = {2}, .any_port = 4711, .num_addresses = 2};
  theirs.addresses[0] = (sluice_tcp_address_t){.family = 4, .bytes = {10, 0, 0, 2}, .port = 4712};
  theirs.addresses[1] = (sluice_tcp_address_t){.family = 6, .bytes = {0x20, 1, [15] = 9}, .port = 4713};
  struct sockaddr_storage target;
  struct sockaddr_in in;
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 0, &target), sizeof in);
  memcpy(&in, &target, sizeof in);
  assert_int_equal(ntohl(in.sin_addr.s_addr), 0x0a000002);
  assert_int_equal(ntohs(in.sin_port), 4712);
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 1, &target), sizeof(struct sockaddr_in6));
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 2, &target), 0);
  /* In the same place, loopback comes first, then the addresses. */
  mine.place[0] = 2;
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 0, &target), sizeof in);
  memcpy(&in, &target, sizeof in);
  assert_int_equal(ntohl(in.sin_addr.s_addr), INADDR_LOOPBACK);
  assert_int_equal(ntohs(in.sin_port), 4711);
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 1, &target), sizeof in);
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 3, &target), 0);
  /* Without loopback if that rank listens only on named interfaces. */
  theirs.any_port = 0;
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 0, &target), sizeof in);
  memcpy(&in, &target, sizeof in);
  assert_int_equal(ntohs(in.sin_port), 4712);
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 2, &target), 0);
  /* Unknown places count as different. */
  mine.place[0] = theirs.place[0] = 0;
  assert_int_equal(sluice_tcp_card_target(&mine, &theirs, 0, &target), sizeof in);
  memcpy(&in, &target, sizeof in);
  assert_int_equal(ntohl(in.sin_addr.s_addr), 0x0a000002);
}

/* ---- codes ------------------------------------------------------------------------------------------------------- */

/* Test vectors of SipHash: the first two of the reference implementation for whole words, and one for the transport's
 * length from another implementation (`openssl mac -macopt size:16 SIPHASH`). */
TEST(TcpMac_VectorsOfTheAuthors_AreMet) {
  static const uint8_t of_0[] = {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6,
                                 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93};
  static const uint8_t of_8[] = {0x3b, 0x62, 0xa9, 0xba, 0x62, 0x58, 0xf5, 0x61,
                                 0x0f, 0x83, 0xe2, 0x64, 0xf3, 0x14, 0x97, 0xb4};
  static const uint8_t of_56[] = {0x19, 0x38, 0xf2, 0xcf, 0x72, 0xd5, 0x4e, 0xe9,
                                  0x7e, 0x94, 0x16, 0x6f, 0xa9, 0x1d, 0x2a, 0x36};
  uint8_t key[16], data[56], out[16];
  for (int i = 0; i < 16; ++i) key[i] = (uint8_t)i;
  for (int i = 0; i < 56; ++i) data[i] = (uint8_t)i;
  sluice_tcp_mac(key, data, 0, out);
  assert_memory_equal(out, of_0, sizeof of_0);
  sluice_tcp_mac(key, data, 8, out);
  assert_memory_equal(out, of_8, sizeof of_8);
  sluice_tcp_mac(key, data, 56, out);
  assert_memory_equal(out, of_56, sizeof of_56);
}

TEST(TcpMac_OneByteDiffers_IsNotEqual) {
  uint8_t a[SLUICE_TCP_MAC_BYTES] = {0}, b[SLUICE_TCP_MAC_BYTES] = {0};
  assert_true(sluice_tcp_mac_is_equal(a, b));
  for (int i = 0; i < SLUICE_TCP_MAC_BYTES; ++i) {
    b[i] = 0x80;
    assert_false(sluice_tcp_mac_is_equal(a, b));
    b[i] = 0;
  }
}
