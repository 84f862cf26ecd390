// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_connection.h"

#include <errno.h>
#include <limits.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/tcp/tcp_descriptors.h"

#define WAKE_BYTES UINT64_C(262144)     /* a fraction of an L2 cache: still there when it is copied */
#define FEW_BYTES  UINT64_C(16384)      /* one or two packets: not worth a system call */
#define LINGER_NS  UINT64_C(2000000000) /* for peers' systems to receive the last bytes and the farewell */

void sluice_tcp_connections_init(sluice_tcp_connection_t* connections, int32_t world_size) {
  for (int32_t r = 0; r < world_size; ++r) {
    connections[r] = (sluice_tcp_connection_t){.socket = -1, .can_write = 1, .can_read = 1, .low_water = 1};
  }
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

int sluice_tcp_watch(int epoll, int fd, uint32_t events, int32_t rank) {
  struct epoll_event event = {.events = events, .data.u32 = (uint32_t)rank};
  return fd >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

int32_t sluice_tcp_watch_all(int epoll, const sluice_tcp_connection_t* connections, int32_t world_size) {
  for (int32_t r = 0; r < world_size; ++r) {
    const int fd = connections[r].socket;
    if (fd >= 0 && !sluice_tcp_watch(epoll, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, r)) return r;
  }
  return world_size;
}

void sluice_tcp_wake(int eventfd) {
  const uint64_t one = 1;
  if (write(eventfd, &one, sizeof one) < 0) { /* full: it has been woken already */
  }
}

void sluice_tcp_note_events(sluice_tcp_connection_t* c, uint32_t events) {
  if ((events & ~(uint32_t)EPOLLOUT) != 0) c->can_read = 1;
  if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) c->can_write = 1;
}

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

int sluice_tcp_is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

int sluice_tcp_is_network(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
}

size_t sluice_tcp_take(sluice_tcp_connection_t* c, void* to, uint64_t room) {
  for (;;) {
    const ssize_t n = recv(c->socket, to, room < INT_MAX ? (size_t)room : INT_MAX, MSG_DONTWAIT);
    if (n > 0) return (size_t)n;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && sluice_tcp_is_full(errno)) {
      c->can_read = 0;
    } else {
      sluice_tcp_lose(c, n == 0 ? 0 : errno);
    }
    return 0;
  }
}

void sluice_tcp_lose(sluice_tcp_connection_t* c, int error) {
  c->can_read = 0;
  if (c->state != SLUICE_TCP_LIVE) return;
  c->state = SLUICE_TCP_LOST;
  if (error != 0) c->native_error = error; /* 0 keeps the error of an earlier send: the system reports it once */
}

int sluice_tcp_set_low_water(sluice_tcp_connection_t* c, uint64_t left) {
  const int32_t wanted = left <= FEW_BYTES ? 1 : (int32_t)sluice_min_u64(left, WAKE_BYTES);
  if (wanted == c->low_water || c->state != SLUICE_TCP_LIVE) return 0;
  c->low_water = wanted;
  c->can_read = 1;
  (void)setsockopt(c->socket, SOL_SOCKET, SO_RCVLOWAT, &wanted,
                   sizeof wanted); /* on an error there are more wake-ups */
  return 1;
}

void sluice_tcp_lose_silent(sluice_tcp_connection_t* connections, int32_t world_size) {
  const uint64_t now_ns = sluice_now_ns();
  for (int32_t r = 0; r < world_size; ++r) {
    sluice_tcp_connection_t* c = &connections[r];
    if (c->socket < 0 || c->state != SLUICE_TCP_LIVE) continue;
    if (sluice_tcp_check_keepalive(c->socket, &c->silence, now_ns)) sluice_tcp_lose(c, ETIMEDOUT);
  }
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

/* Continues to say goodbye, as far as the socket accepts it. Returns 1 if there is nothing left to wait for: the peer's
 * system has confirmed everything, or the connection was closed by both sides or is broken. */
static int has_said_goodbye(sluice_tcp_connection_t* c, const void* frame, uint32_t bytes) {
  struct pollfd ended = {.fd = c->socket};
  int unconfirmed = 0;
  if (poll(&ended, 1, 0) > 0) return 1;
  if (c->said < bytes) {
    const ssize_t n = send(c->socket, (const char*)frame + c->said, bytes - c->said, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && !sluice_tcp_is_full(errno) && errno != EINTR) return 1;
    if (n > 0) c->said += (uint32_t)n;
    if (c->said < bytes) return 0;
    (void)shutdown(c->socket, SHUT_WR);
  }
  return ioctl(c->socket, SIOCOUTQ, &unconfirmed) != 0 || unconfirmed == 0;
}

void sluice_tcp_say_goodbye(sluice_tcp_connection_t* connections, int32_t world_size, const void* frame,
                            uint32_t bytes) {
  const uint64_t deadline_ns = sluice_now_ns() + LINGER_NS;
  for (int is_over = 0; !is_over && sluice_now_ns() < deadline_ns;) {
    is_over = 1;
    for (int32_t r = 0; r < world_size; ++r) {
      sluice_tcp_connection_t* c = &connections[r];
      if (c->socket >= 0 && c->state == SLUICE_TCP_LIVE && !has_said_goodbye(c, frame, bytes)) is_over = 0;
    }
    const struct timespec pause = {.tv_nsec = 1000000};
    if (!is_over) nanosleep(&pause, NULL);
  }
}

void sluice_tcp_part(const sluice_tcp_connection_t* connections, int32_t world_size) {
  const uint64_t begin_ns = sluice_now_ns();
  int is_over;
  do {
    is_over = 1;
    for (int32_t r = 0; r < world_size; ++r) {
      const sluice_tcp_connection_t* c = &connections[r];
      if (c->socket < 0 || c->state != SLUICE_TCP_LIVE) continue;
      if (!sluice_tcp_is_shut_down(c->socket, c->is_told)) is_over = 0;
    }
  } while (!is_over && sluice_tcp_shutdown_goes_on(begin_ns));
}
