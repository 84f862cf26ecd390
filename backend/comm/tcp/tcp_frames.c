// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_frames.h"

#include <errno.h>
#include <limits.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "backend/comm/tcp/tcp_descriptors.h"

enum { FRAME_DATA = 0x736c7531, FRAME_BYE = 0x736c7532, FRAME_LOST = 0x736c7533 };

/* The sender has lost `culprit` and ends its connections next. */
static void hear_of_loss(sluice_tcp_frames_t* f, int32_t peer, uint32_t culprit) {
  const int is_third = culprit < (uint32_t)f->world_size && culprit != (uint32_t)f->rank;
  if (f->lost < 0 && is_third) f->lost = (int32_t)culprit;
  sluice_tcp_lose(&f->connections[peer], 0);
}

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
  sluice_tcp_connection_t* c = &f->connections[peer];
  sluice_comm_request_t* request;
  while (c->can_write && c->state == SLUICE_TCP_LIVE && (request = next_request(f, peer, 1)) != NULL) {
    sluice_tcp_transfer_t* t = &request->transfers[peer];
    if (p->out_used == 0) {
      p->out = (sluice_tcp_frame_t){.kind = FRAME_DATA, .number = request->number, .bytes = t->send_left};
    }
    struct iovec parts[2] = {
        {.iov_base = (char*)&p->out + p->out_used, .iov_len = sizeof p->out - p->out_used},
        {.iov_base = (char*)(uintptr_t)t->send, .iov_len = t->send_left < INT_MAX ? (size_t)t->send_left : INT_MAX}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t n = sendmsg(c->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      c->can_write = 0;
      if (sluice_tcp_is_full(errno)) return;
      /* The peer's last frames, if any, say why: read them before the peer counts as lost. */
      c->can_read = 1;
      if (errno != EPIPE) c->native_error = errno;
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

/* Receives the data that has arrived from this peer for requests in flight. */
static void pull(sluice_tcp_frames_t* f, int32_t peer) {
  sluice_tcp_peer_t* p = &f->peers[peer];
  sluice_tcp_connection_t* c = &f->connections[peer];
  while (c->can_read && c->state == SLUICE_TCP_LIVE) {
    if (p->in_used < sizeof p->in) {
      p->in_used += (uint32_t)sluice_tcp_take(c, (char*)&p->in + p->in_used, sizeof p->in - p->in_used);
      continue;
    }
    if (p->in.kind == FRAME_BYE) {
      c->state = SLUICE_TCP_LEFT;
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
      sluice_tcp_lose(c, EPROTO);
      return;
    }
    const size_t n = sluice_tcp_take(c, t->recv, t->recv_left);
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
    if (f->lost < 0 && f->connections[r].state == SLUICE_TCP_LOST) f->lost = r;
  }
}

int sluice_tcp_set_low_waters(sluice_tcp_frames_t* f) {
  int has_changed = 0;
  for (int32_t r = 0; r < f->world_size; ++r) {
    const sluice_comm_request_t* request = f->peers[r].in_used == sizeof f->peers[r].in ? next_request(f, r, 0) : NULL;
    const uint64_t left = request != NULL ? request->transfers[r].recv_left : 0;
    if (r != f->rank) has_changed |= sluice_tcp_set_low_water(&f->connections[r], left);
  }
  return has_changed;
}

/* Sent only between frames: after half of a frame it would be taken for the other half. */
void sluice_tcp_tell_of_loss(sluice_tcp_frames_t* f, int32_t culprit) {
  const sluice_tcp_frame_t frame = {.kind = FRAME_LOST, .number = (uint32_t)culprit};
  if (f->has_told || culprit == f->rank) return;
  f->has_told = 1;
  for (int32_t r = 0; r < f->world_size; ++r) {
    sluice_tcp_connection_t* c = &f->connections[r];
    if (r == f->rank || r == culprit || c->state != SLUICE_TCP_LIVE || f->peers[r].out_used > 0) continue;
    c->is_told = sluice_tcp_send_lost_rank(c->socket, &frame,
                                           sizeof frame); /* otherwise the peer sees only the end of the connection */
  }
}

void sluice_tcp_leave(sluice_tcp_frames_t* f) {
  const sluice_tcp_frame_t bye = {.kind = FRAME_BYE};
  sluice_tcp_say_goodbye(f->connections, f->world_size, &bye, sizeof bye);
}
