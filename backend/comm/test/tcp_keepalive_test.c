// SPDX-License-Identifier: Apache-2.0
/* A peer whose machine no longer answers is soon reported as lost; a peer that only keeps others waiting is not.
 *
 * A filter drops all packets that arrive at the sockets of a process, including acknowledgements, so that neither end
 * sees a connection end. Each case is a process, so that all cases run at once: they wait for half a minute and compute
 * almost nothing. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_keepalive.h"
#include "backend/comm/test/tcp_ranks.h"
#include "third_party/bazel/test.h"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

enum { WORLD = 2, NO_FILTER = 77, NO_RTO_MAX, DEADLINE_S = 120 };

#define SECOND_NS UINT64_C(1000000000)
/* 12 s after the last answer, plus a reserve for a busy machine. Linux gives up after 51 s if TCP_RTO_MAX_MS is set,
 * and after a quarter of an hour otherwise. */
#define SOON_NS    (25 * SECOND_NS)
#define FEW_BYTES  UINT64_C(8)
#define MANY_BYTES (UINT64_C(64) << 20) /* more than the socket buffers of both ends hold */

static void sleep_s(int seconds) {
  struct timespec left = {.tv_sec = seconds};
  while (nanosleep(&left, &left) != 0) {
  }
}

static int for_each_connection(int (*action)(int fd)) {
  int count = 0;
  for (int fd = 3; fd < 256; ++fd) {
    struct sockaddr_storage peer;
    socklen_t bytes = sizeof peer;
    if (getpeername(fd, (struct sockaddr*)&peer, &bytes) == 0 && peer.ss_family != AF_UNIX) count += action(fd);
  }
  return count;
}

static int drop_all(int fd) {
  struct sock_filter nothing[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
  const struct sock_fprog program = {.len = 1, .filter = nothing};
  return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
}

static void cut(void) {
  if (for_each_connection(drop_all) != WORLD) abort();
}

/* ---- cases: what rank 0 and rank 1 do ---------------------------------------------------------------------------- */

static char* block;

/* Moves `bytes` from rank `from` to the other rank. */
static sluice_status_t carry(tcp_rank_t* me, int32_t from, uint64_t bytes) {
  const int32_t other = 1 - me->rank;
  const void* send[WORLD] = {NULL, NULL};
  void* recv[WORLD] = {NULL, NULL};
  uint64_t sent[WORLD] = {0, 0}, received[WORLD] = {0, 0};
  send[other] = block;
  recv[other] = block + MANY_BYTES;
  if (me->rank == from) {
    sent[other] = bytes;
  } else {
    received[other] = bytes;
  }
  const sluice_exchange_t exchange = {.send = send, .send_bytes = sent, .recv = recv, .recv_bytes = received};
  sluice_comm_request_t* request;
  me->status = sluice_comm_exchange_start(me->comm, &exchange, &request);
  if (me->status == SLUICE_OK) me->status = sluice_comm_exchange_wait(me->comm, request, "a message of the test");
  if (me->status != SLUICE_OK) sluice_error_last(&me->why);
  return me->status;
}

static uint64_t cut_ns, noticed_ns;

static void lose_while_idle(tcp_rank_t* me) {
  if (me->rank == 0) {
    cut_ns = sluice_now_ns();
    cut();
    carry(me, 1, FEW_BYTES); /* nothing arrives */
    noticed_ns = sluice_now_ns();
  }
  tcp_ranks_meet(me);
}

static void lose_with_bytes_for_it(tcp_rank_t* me) {
  if (me->rank == 0) {
    cut_ns = sluice_now_ns();
    cut();
    if (carry(me, 0, FEW_BYTES) == SLUICE_OK) carry(me, 1, FEW_BYTES); /* the kernel has accepted these bytes */
    noticed_ns = sluice_now_ns();
  }
  tcp_ranks_meet(me);
}

static void lose_after_it_had_no_room(tcp_rank_t* me) {
  if (me->rank == 0) {
    carry(me, 0, MANY_BYTES);
    noticed_ns = sluice_now_ns();
  } else {
    sleep_s(20);
    cut_ns = sluice_now_ns();
    cut();
  }
  tcp_ranks_meet(me);
}

/* Rank 1 sleeps, like a rank that computes or is stopped; its kernel answers that its buffer is full. */
static void keep_waiting(tcp_rank_t* me) {
  if (me->rank == 1) sleep_s(25);
  carry(me, 0, MANY_BYTES);
  tcp_ranks_meet(me);
}

/* Neither rank sends or waits. */
static void say_nothing(tcp_rank_t* me) {
  sleep_s(25);
  carry(me, 0, FEW_BYTES);
  tcp_ranks_meet(me);
}

typedef struct case_s {
  void (*then)(tcp_rank_t* me);
  int is_lost; /* rank 0 must lose rank 1 */
  int needs_rto_max;
  pid_t pid;
} case_t;

static case_t cases[] = {
    {.then = lose_while_idle, .is_lost = 1},
    {.then = lose_with_bytes_for_it, .is_lost = 1},
    {.then = lose_after_it_had_no_room, .is_lost = 1, .needs_rto_max = 1},
    {.then = keep_waiting},
    {.then = say_nothing},
};
enum { NUM_CASES = sizeof cases / sizeof *cases };

/* ---- the process of a case --------------------------------------------------------------------------------------- */

static int has_rto_max(void) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), value = 3000;
  const int is_known = setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &value, sizeof value) == 0;
  close(fd);
  return is_known;
}

/* Some sandboxes do not allow filters. */
static int may_cut(void) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), may = drop_all(fd);
  close(fd);
  return may;
}

static int run_case(const case_t* c) {
  tcp_rank_t ranks[WORLD];
  if (c->is_lost && !may_cut()) return NO_FILTER;
  if (c->needs_rto_max && !has_rto_max()) return NO_RTO_MAX;
  block = calloc(2, MANY_BYTES);
  if (block == NULL) return 1;
  for (int r = 0; r < WORLD; ++r) ranks[r] = (tcp_rank_t){.then = c->then, .timeout_ns = DEADLINE_S * SECOND_NS};
  tcp_ranks_run(ranks, WORLD);
  free(block);
  const double took_s = (double)(noticed_ns - cut_ns) / 1e9;
  for (int r = 0; r < WORLD; ++r) {
    if (ranks[r].status != SLUICE_OK) fprintf(stderr, "rank %d: %s\n", r, ranks[r].why.message);
  }
  if (!c->is_lost) return ranks[0].status != SLUICE_OK || ranks[1].status != SLUICE_OK;
  fprintf(stderr, "noticed after %.1f s\n", took_s);
  return ranks[0].status != SLUICE_E_PEER_LOST || ranks[0].why.peer != 1 || noticed_ns - cut_ns > SOON_NS ||
         strstr(ranks[0].why.message, "has not responded for 12 s") == NULL;
}

static int start_all(void** state) {
  (void)state;
  fflush(NULL);
  for (int i = 0; i < NUM_CASES; ++i) {
    cases[i].pid = fork();
    if (cases[i].pid == 0) _exit(run_case(&cases[i]));
    if (cases[i].pid < 0) return 1;
  }
  return 0;
}

static void await(void (*then)(tcp_rank_t* me)) {
  int i = 0, code = -1;
  while (cases[i].then != then) ++i;
  assert_int_equal(waitpid(cases[i].pid, &code, 0), cases[i].pid);
  if (WIFEXITED(code) && WEXITSTATUS(code) == NO_FILTER) skip_because("no SO_ATTACH_FILTER");
  if (WIFEXITED(code) && WEXITSTATUS(code) == NO_RTO_MAX) skip_because("this kernel has no TCP_RTO_MAX_MS");
  assert_int_equal(code, 0);
}

TEST(TcpWait_IdlePeerFallsSilent_IsLostByName) { await(lose_while_idle); }
TEST(TcpWait_PeerWithBytesForItFallsSilent_IsLostByName) { await(lose_with_bytes_for_it); }
TEST(TcpWait_PeerWithFullBuffersFallsSilent_IsLostByName) { await(lose_after_it_had_no_room); }
TEST(TcpWait_PeerWithFullBuffersAnswers_IsWaitedFor) { await(keep_waiting); }
TEST(TcpConnection_IdleForLong_Stands) { await(say_nothing); }

/* ---- repeated checks of one connection --------------------------------------------------------------------------- */

typedef struct pair_s {
  int here, there;
} pair_t;

/* Connects two non-blocking sockets over loopback. */
static pair_t connect_pair(void) {
  pair_t pair;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(listener, (struct sockaddr*)&address, sizeof address), 0);
  assert_int_equal(listen(listener, 1), 0);
  assert_int_equal(getsockname(listener, (struct sockaddr*)&address, &size), 0);
  pair.here = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(connect(pair.here, (struct sockaddr*)&address, sizeof address), 0);
  pair.there = accept(listener, NULL, NULL);
  assert_true(pair.there >= 0);
  close(listener);
  for (int i = 0; i < 2; ++i) assert_int_equal(fcntl(i == 0 ? pair.here : pair.there, F_SETFL, O_NONBLOCK), 0);
  return pair;
}

static void say_something(int fd) { assert_int_equal(write(fd, "x", 1), 1); }

/* Checks once per second of a simulated clock until the peer is silent, at most 100 times. Returns the number. */
static int count_looks(int fd, sluice_tcp_keepalive_t* silence, uint64_t* now_ns) {
  int num_looks = 0;
  while (num_looks < 100) {
    ++num_looks;
    *now_ns += SECOND_NS;
    if (sluice_tcp_check_keepalive(fd, silence, *now_ns)) break;
  }
  return num_looks;
}

/* After a virtual machine was paused or a process was stopped, the clock has advanced without any check. */
TEST(TcpLook_ClockGoesOnAndNobodyLooks_IsNoSilence) {
  const pair_t pair = connect_pair();
  sluice_tcp_keepalive_t silence = {0};
  uint64_t now_ns = SECOND_NS;
  assert_false(sluice_tcp_check_keepalive(pair.here, &silence, now_ns));
  assert_true(drop_all(pair.there));
  say_something(pair.here);
  sleep_s(2); /* at least three retransmissions: after 0.2, 0.6 and 1.4 s */
  for (int pauses = 0; pauses < SLUICE_TCP_KEEPALIVE_S - 1; ++pauses) {
    now_ns += 1000 * SECOND_NS;
    assert_false(sluice_tcp_check_keepalive(pair.here, &silence, now_ns));
  }
  assert_int_equal(count_looks(pair.here, &silence, &now_ns), 1);
  assert_true(silence.is_silent);
  close(pair.here);
  close(pair.there);
}

TEST(TcpLook_NothingWasAsked_IsNoSilence) {
  const pair_t pair = connect_pair();
  sluice_tcp_keepalive_t silence = {0};
  uint64_t now_ns = SECOND_NS;
  assert_int_equal(count_looks(pair.here, &silence, &now_ns), 100);
  close(pair.here);
  close(pair.there);
}

/* ---- the end of a connection when a rank gives up: its last frame arrives, and the end of the peer is seen after all
 * the bytes that nobody reads ---- */

/* Sends until the kernel accepts no more. */
static void fill(int socket) {
  static const char nothing[65536];
  for (int misses = 0; misses < 50;) {
    if (send(socket, nothing, sizeof nothing, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
      misses = 0;
    } else {
      ++misses;
      usleep(1000);
    }
  }
}

static int parts_in_time(int socket, int is_told) {
  const uint64_t begin_ns = sluice_now_ns();
  int has_parted;
  do {
    has_parted = sluice_tcp_is_shut_down(socket, is_told);
  } while (!has_parted && sluice_tcp_shutdown_goes_on(begin_ns));
  return has_parted;
}

TEST(LastWords_BesideUnreadBytes_Arrive) {
  static const char words[16] = "rank 3 is lost";
  char heard[16];
  const pair_t pair = connect_pair();
  fill(pair.there);
  assert_true(sluice_tcp_send_lost_rank(pair.here, words, sizeof words));
  assert_true(parts_in_time(pair.here, 1));
  close(pair.here);
  assert_int_equal(recv(pair.there, heard, sizeof heard, MSG_DONTWAIT), sizeof heard);
  assert_memory_equal(heard, words, sizeof words);
  close(pair.there);
}

TEST(LastWords_FullConnection_AreNotTaken) {
  static const char words[16] = "rank 3 is lost";
  const pair_t pair = connect_pair();
  fill(pair.here);
  assert_false(sluice_tcp_send_lost_rank(pair.here, words, sizeof words));
  assert_false(parts_in_time(pair.here, 0)); /* the peer is alive and has no reason to close */
  close(pair.there);
  assert_true(parts_in_time(pair.here, 0));
  close(pair.here);
}

TEST(PeersEnd_BehindMoreThanASocketHolds_IsSeen) {
  const pair_t pair = connect_pair();
  fill(pair.there);
  assert_int_equal(shutdown(pair.there, SHUT_WR), 0);
  assert_true(parts_in_time(pair.here, 0));
  close(pair.here);
  close(pair.there);
}

int main(void) { return run_cases(start_all, NULL); }
