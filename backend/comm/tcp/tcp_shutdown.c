// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_shutdown.h"

#include <errno.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

#include "backend/base/clock.h"

#define MOST_NS UINT64_C(1000000000)

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
  return sluice_now_ns() - begin_ns < MOST_NS;
}
