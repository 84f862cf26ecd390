// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_frames.h"

#include <errno.h>
#include <limits.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/comm/tcp/tcp_descriptors.h"

#define WAKE_BYTES UINT64_C(262144)     /* a fraction of an L2 cache: still there when it is copied */
#define FEW_BYTES  UINT64_C(16384)      /* one or two packets: not worth a system call */
#define LINGER_NS  UINT64_C(2000000000) /* for peers' systems to receive the last bytes and the farewell */

enum { FRAME_DATA = 0x736c7531, FRAME_BYE = 0x736c7532, FRAME_LOST = 0x736c7533 };

static void lose(sluice_tcp_frames_t* f, int32_t peer, int error) {
  sluice_tcp_peer_t* p = &f->peers[peer];
  p->can_read = p->can_write = 0;
  if (p->state != SLUICE_TCP_LIVE) return;
  p->state = SLUICE_TCP_LOST;
  if (error != 0) p->native_error = error;
  if (f->lost < 0) f->lost = peer;
}

/* The sender has lost `culprit` and ends its connections next. */
static void hear_of_loss(sluice_tcp_frames_t* f, int32_t peer, uint32_t culprit) {
  const int is_third = culprit < (uint32_t)f->world_size && culprit != (uint32_t)f->rank;
  if (f->lost < 0 && is_third) f->lost = (int32_t)culprit;
  lose(f, peer, 0);
}

static int is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

/* Returns the request whose message is next on the connection: the older one with anything left. */
static sluice_comm_request_t* next_request(sluice_tcp_frames_t* f, int32_t peer, int is_send) {
  sluice_comm_request_t* found = NULL;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    sluice_comm_request_t* r = &f->requests[i];
    if (!r->is_used || !(is_send ? r->transfers[peer].is_sending : r->transfers[peer].is_receiving)) continue;
    if (found == NULL || (int32_t)(r->number - found->number) < 0) found = r;
  }
  return found;
}

void sluice_tcp_push(sluice_tcp_frames_t* f, int32_t peer) {
  sluice_tcp_peer_t* p = &f->peers[peer];
  sluice_comm_request_t* request;
  while (p->can_write && p->state == SLUICE_TCP_LIVE && (request = next_request(f, peer, 1)) != NULL) {
    sluice_tcp_transfer_t* t = &request->transfers[peer];
    if (p->out_used == 0) {
      p->out = (sluice_tcp_frame_t){.kind = FRAME_DATA, .number = request->number, .bytes = t->send_left};
    }
    struct iovec parts[2] = {
        {.iov_base = (char*)&p->out + p->out_used, .iov_len = sizeof p->out - p->out_used},
        {.iov_base = (char*)(uintptr_t)t->send, .iov_len = t->send_left < INT_MAX ? (size_t)t->send_left : INT_MAX}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t n = sendmsg(f->sockets[peer], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      p->can_write = 0;
      if (is_full(errno)) return;
      /* The peer's last frames, if any, say why: read them before the peer counts as lost. */
      p->can_read = 1;
      if (errno != EPIPE) p->native_error = errno;
      return;
    }
    const size_t header = (size_t)n < parts[0].iov_len ? (size_t)n : parts[0].iov_len;
    p->out_used += (uint32_t)header;
    t->send += (size_t)n - header;
    t->send_left -= (size_t)n - header;
    if (p->out_used < sizeof p->out || t->send_left > 0) continue;
    p->out_used = 0;
    t->is_sending = 0;
    --request->pending;
  }
}

/* Reads up to `room` bytes. Returns 0 if there are none now, or the connection has ended. */
static size_t take(sluice_tcp_frames_t* f, int32_t peer, void* to, uint64_t room) {
  sluice_tcp_peer_t* p = &f->peers[peer];
  for (;;) {
    const ssize_t n = recv(f->sockets[peer], to, room < INT_MAX ? (size_t)room : INT_MAX, MSG_DONTWAIT);
    if (n > 0) return (size_t)n;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && is_full(errno)) {
      p->can_read = 0;
    } else {
      lose(f, peer, n == 0 ? 0 : errno);
    }
    return 0;
  }
}

/* Receives the data that has arrived from this peer for requests in flight. */
static void pull(sluice_tcp_frames_t* f, int32_t peer) {
  sluice_tcp_peer_t* p = &f->peers[peer];
  while (p->can_read && p->state == SLUICE_TCP_LIVE) {
    if (p->in_used < sizeof p->in) {
      p->in_used += (uint32_t)take(f, peer, (char*)&p->in + p->in_used, sizeof p->in - p->in_used);
      continue;
    }
    if (p->in.kind == FRAME_BYE) {
      p->state = SLUICE_TCP_LEFT;
      return;
    }
    if (p->in.kind == FRAME_LOST) {
      hear_of_loss(f, peer, p->in.number);
      return;
    }
    sluice_comm_request_t* request = next_request(f, peer, 0);
    if (request == NULL) return; /* not requested yet: it stays in the socket */
    sluice_tcp_transfer_t* t = &request->transfers[peer];
    if (p->in.kind != FRAME_DATA || p->in.number != request->number || p->in.bytes != t->recv_left) {
      p->expected = t->recv_left;
      lose(f, peer, EPROTO);
      return;
    }
    const size_t n = take(f, peer, t->recv, t->recv_left);
    t->recv += n;
    t->recv_left -= n;
    p->in.bytes -= n;
    if (t->recv_left > 0) continue;
    p->in_used = 0;
    t->is_receiving = 0;
    --request->pending;
  }
}

void sluice_tcp_progress(sluice_tcp_frames_t* f) {
  for (int32_t r = 0; r < f->world_size; ++r) {
    if (r == f->rank) continue;
    sluice_tcp_push(f, r);
    pull(f, r);
  }
}

/* Sets the number of bytes at which the socket wakes a wait. The end of a connection, or a full buffer, wakes it in any
 * case. Returns 1 if the number has changed and that many bytes may already be there: read again, since no edge reports
 * them. */
static int set_low_water(sluice_tcp_frames_t* f, int32_t peer) {
  sluice_tcp_peer_t* p = &f->peers[peer];
  const sluice_comm_request_t* request = p->in_used == sizeof p->in ? next_request(f, peer, 0) : NULL;
  const uint64_t left = request != NULL ? request->transfers[peer].recv_left : 0;
  const int32_t wanted = left <= FEW_BYTES ? 1 : (int32_t)(left < WAKE_BYTES ? left : WAKE_BYTES);
  if (wanted == p->low_water || p->state != SLUICE_TCP_LIVE) return 0;
  p->low_water = wanted;
  p->can_read = 1;
  (void)setsockopt(f->sockets[peer], SOL_SOCKET, SO_RCVLOWAT, &wanted,
                   sizeof wanted); /* on an error there are more wake-ups */
  return 1;
}

int sluice_tcp_set_low_water(sluice_tcp_frames_t* f) {
  int has_changed = 0;
  for (int32_t r = 0; r < f->world_size; ++r) {
    if (r != f->rank) has_changed |= set_low_water(f, r);
  }
  return has_changed;
}

void sluice_tcp_lose_silent(sluice_tcp_frames_t* f) {
  const uint64_t now_ns = sluice_now_ns();
  for (int32_t r = 0; r < f->world_size; ++r) {
    sluice_tcp_peer_t* p = &f->peers[r];
    if (r == f->rank || p->state != SLUICE_TCP_LIVE) continue;
    if (sluice_tcp_check_keepalive(f->sockets[r], &p->silence, now_ns)) lose(f, r, ETIMEDOUT);
  }
}

/* Sent only between frames: after half of a frame it would be taken for the other half. */
void sluice_tcp_tell_of_loss(sluice_tcp_frames_t* f, int32_t culprit) {
  const sluice_tcp_frame_t frame = {.kind = FRAME_LOST, .number = (uint32_t)culprit};
  if (f->has_told || culprit == f->rank) return;
  f->has_told = 1;
  for (int32_t r = 0; r < f->world_size; ++r) {
    sluice_tcp_peer_t* p = &f->peers[r];
    if (r == f->rank || r == culprit || p->state != SLUICE_TCP_LIVE || p->out_used > 0) continue;
    p->is_told = sluice_tcp_send_lost_rank(f->sockets[r], &frame,
                                           sizeof frame); /* otherwise the peer sees only the end of the connection */
  }
}

void sluice_tcp_part(sluice_tcp_frames_t* f) {
  const uint64_t begin_ns = sluice_now_ns();
  int is_over;
  if (!f->has_told) return;
  do {
    is_over = 1;
    for (int32_t r = 0; r < f->world_size; ++r) {
      if (r == f->rank || f->peers[r].state != SLUICE_TCP_LIVE) continue;
      if (!sluice_tcp_is_shut_down(f->sockets[r], f->peers[r].is_told)) is_over = 0;
    }
  } while (!is_over && sluice_tcp_shutdown_goes_on(begin_ns));
}

/* Returns whether a live connection has bytes that the peer's system has not confirmed. */
static int has_unsent(const sluice_tcp_frames_t* f) {
  for (int32_t r = 0; r < f->world_size; ++r) {
    int bytes = 0;
    if (r == f->rank || f->peers[r].state != SLUICE_TCP_LIVE) continue;
    struct pollfd p = {.fd = f->sockets[r]};
    if (poll(&p, 1, 0) > 0) continue; /* closed by both sides, or broken */
    if (ioctl(f->sockets[r], SIOCOUTQ, &bytes) == 0 && bytes > 0) return 1;
  }
  return 0;
}

void sluice_tcp_say_goodbye(sluice_tcp_frames_t* f) {
  const sluice_tcp_frame_t bye = {.kind = FRAME_BYE};
  for (int32_t r = 0; r < f->world_size; ++r) {
    sluice_tcp_peer_t* p = &f->peers[r];
    if (r == f->rank || p->state != SLUICE_TCP_LIVE) continue;
    if (send(f->sockets[r], &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof bye) continue;
    (void)shutdown(f->sockets[r], SHUT_WR);
  }
  const uint64_t deadline_ns = sluice_now_ns() + LINGER_NS;
  while (has_unsent(f) && sluice_now_ns() < deadline_ns) {
    const struct timespec pause = {.tv_nsec = 1000000};
    nanosleep(&pause, NULL);
  }
}
