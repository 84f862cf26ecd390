// SPDX-License-Identifier: Apache-2.0
/* Tests when repeated checks of a TCP connection report a peer as silent. */
#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "backend/comm/tcp/tcp_keepalive.h"
#include "third_party/bazel/test.h"

#define SECOND_NS UINT64_C(1000000000)

typedef struct pair_s {
  int here, there;
} pair_t;

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
  return pair;
}

/* The kernel drops everything that arrives at this socket from now on, without an acknowledgement. */
static void go_deaf(int fd) {
  struct sock_filter nothing[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
  const struct sock_fprog program = {.len = 1, .filter = nothing};
  assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
}

static void say_something(int fd) { assert_int_equal(write(fd, "x", 1), 1); }
static void sleep_ms(int64_t ms) {
  const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

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
  go_deaf(pair.there);
  say_something(pair.here);
  sleep_ms(2000); /* at least three retransmissions: after 0.2, 0.6 and 1.4 s */
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
