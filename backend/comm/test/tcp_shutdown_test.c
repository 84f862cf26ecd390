// SPDX-License-Identifier: Apache-2.0
/* The end of a connection when a rank gives up: its last frame arrives, and the end of the peer is seen after all the
 * bytes that nobody reads. */

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/tcp/tcp_shutdown.h"
#include "third_party/bazel/test.h"

/* Connects two non-blocking sockets over loopback. */
static void connect_two(int ends[2]) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t bytes = sizeof address;
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(listener, (struct sockaddr*)&address, sizeof address), 0);
  assert_int_equal(listen(listener, 1), 0);
  assert_int_equal(getsockname(listener, (struct sockaddr*)&address, &bytes), 0);
  ends[0] = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(connect(ends[0], (struct sockaddr*)&address, sizeof address), 0);
  ends[1] = accept(listener, NULL, NULL);
  assert_true(ends[1] >= 0);
  close(listener);
  for (int i = 0; i < 2; ++i) assert_int_equal(fcntl(ends[i], F_SETFL, O_NONBLOCK), 0);
}

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
  int ends[2];
  connect_two(ends);
  fill(ends[1]);
  assert_true(sluice_tcp_send_lost_rank(ends[0], words, sizeof words));
  assert_true(parts_in_time(ends[0], 1));
  close(ends[0]);
  assert_int_equal(recv(ends[1], heard, sizeof heard, MSG_DONTWAIT), sizeof heard);
  assert_memory_equal(heard, words, sizeof words);
  close(ends[1]);
}

TEST(LastWords_FullConnection_AreNotTaken) {
  static const char words[16] = "rank 3 is lost";
  int ends[2];
  connect_two(ends);
  fill(ends[0]);
  assert_false(sluice_tcp_send_lost_rank(ends[0], words, sizeof words));
  assert_false(parts_in_time(ends[0], 0)); /* the peer is alive and has no reason to close */
  close(ends[1]);
  assert_true(parts_in_time(ends[0], 0));
  close(ends[0]);
}

TEST(PeersEnd_BehindMoreThanASocketHolds_IsSeen) {
  int ends[2];
  connect_two(ends);
  fill(ends[1]);
  assert_int_equal(shutdown(ends[1], SHUT_WR), 0);
  assert_true(parts_in_time(ends[0], 0));
  close(ends[0]);
  close(ends[1]);
}
