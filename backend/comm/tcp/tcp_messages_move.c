// SPDX-License-Identifier: Apache-2.0
/* Moves bytes of messages in and out of one peer's connection. */
#include <errno.h>
#include <limits.h>
#include <linux/pkt_sched.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_messages.h"

enum { MAX_PARTS = 64 };

/* Bound on bytes from one peer before the others are checked. */
#define TURN_BYTES UINT64_C(4194304)

/* ---- priorities -------------------------------------------------------------------------------------------------- */

/* The system doubles these, for its own bookkeeping. */
enum { FEW_SENT = 32 << 10, MANY_SENT = 4 << 20 };

/* One piece in this time is 0.65 % of 1 Gbit/s, 6.5 % of 0.1 Gbit/s. */
#define MOST_WAIT_NS UINT64_C(20000000)

/* Ignored bytes of other traffic: peers confirm the last packets of a message only about 40 ms later if they have
 * nothing to answer. */
enum { UNCONFIRMED_BYTES = 32 << 10 };

/* The socket priority also serves as the mark of connections that give way. Queues with classes (pfifo_fast, prio)
 * respect it. */
void sluice_tcp_set_gives_way(int fd, int gives_way) {
  const int priority = gives_way ? TC_PRIO_BULK : TC_PRIO_BESTEFFORT;
  const int bytes = gives_way ? FEW_SENT : MANY_SENT;
  (void)setsockopt(fd, SOL_SOCKET, SO_PRIORITY, &priority, sizeof priority);
  (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes); /* as many as the system allows */
}

static int gives_way(int fd) {
  int priority = TC_PRIO_BESTEFFORT;
  socklen_t size = sizeof priority;
  return getsockopt(fd, SOL_SOCKET, SO_PRIORITY, &priority, &size) == 0 && priority == TC_PRIO_BULK;
}

/* Descriptors without such a queue (listeners, eventfds) fail the ioctl. */
static int goes_first(int fd) {
  int bytes = 0;
  return ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > UNCONFIRMED_BYTES && !gives_way(fd);
}

/* Returns 1 if a connection that gives way may send a piece now. waits_ns: since when it has waited (0: it does not
 * wait), kept between calls. */
static int is_its_turn(uint64_t* waits_ns, uint64_t now_ns) {
  if (*waits_ns == 0) *waits_ns = now_ns;
  if (now_ns - *waits_ns < MOST_WAIT_NS && sluice_tcp_has_descriptor(goes_first)) return 0;
  *waits_ns = 0;
  return 1;
}

/* ---- out --------------------------------------------------------------------------------------------------------- */

static uint64_t front_bytes(const sluice_outgoing_t* out) { return sizeof out->frame + out->frame.head_bytes; }

/* Collects the remaining parts of a message, as many as fit: its front, and up to `room` bytes of the payload. */
static int gather(const sluice_outgoing_t* out, uint64_t room, struct iovec* parts) {
  int n = 0;
  uint64_t skip = out->progress;
  const uint64_t front = front_bytes(out);
  if (skip < front) {
    parts[n++] = (struct iovec){.iov_base = (char*)(uintptr_t)&out->frame + skip, .iov_len = front - skip};
    skip = 0;
  } else {
    skip -= front;
  }
  for (int32_t i = 0; i < out->num_spans && n < MAX_PARTS && room > 0; ++i) {
    const sluice_message_span_t* span = &out->spans[i];
    if (skip >= span->bytes) {
      skip -= span->bytes;
      continue;
    }
    const uint64_t left = sluice_min_u64(span->bytes - skip, room);
    parts[n++] = (struct iovec){.iov_base = (char*)(uintptr_t)span->data + skip, .iov_len = left};
    skip = 0;
    room -= left;
  }
  return n;
}

/* Returns whether other traffic goes first now. */
static int has_to_wait(tcp_wire_t* wire) {
  wire->is_waiting = wire->gives_way && !is_its_turn(&wire->waits_ns, sluice_now_ns());
  return wire->is_waiting;
}

void sluice_tcp_messages_push(tcp_wire_t* wire, int32_t peer) {
  tcp_messages_peer_t* p = &wire->peers[peer];
  sluice_tcp_connection_t* c = &wire->connections[peer];
  sluice_outgoing_t* out;
  while (c->can_write && (out = sluice_outgoing_first(&p->queue)) != NULL && !wire->is_dead && !has_to_wait(wire)) {
    struct iovec parts[MAX_PARTS];
    const uint64_t room = wire->gives_way ? SLUICE_TCP_PIECE_BYTES : INT_MAX; /* the most that one call accepts */
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)gather(out, room, parts)};
    const ssize_t n = sendmsg(c->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      c->can_write = 0;
      /* A broken connection is handled by the read, because the peer's last frames come first. */
      if (!sluice_tcp_is_full(errno) && errno != EPIPE) p->out_error = errno;
      return;
    }
    out->progress += (uint64_t)n;
    if (out->progress < front_bytes(out) + out->frame.payload_bytes) continue;
    sluice_list_remove(&out->place);
    sluice_messages_sent(wire->messages, out); /* from here on `out` may be reused for another message */
  }
}

/* ---- in ---------------------------------------------------------------------------------------------------------- */

/* Handles a complete frame. */
static void begin(tcp_wire_t* wire, int32_t peer) {
  tcp_messages_peer_t* p = &wire->peers[peer];
  sluice_tcp_connection_t* c = &wire->connections[peer];
  p->arrived = 0;
  if (p->in.kind == SLUICE_FRAME_MESSAGE) {
    if (sluice_messages_arrive(wire->messages, peer, &p->in, &p->arrival) != SLUICE_OK) c->can_read = 0;
    return;
  }
  p->in_used = 0;
  if (p->in.kind == SLUICE_FRAME_LEAVES) {
    c->state = SLUICE_TCP_LEFT;
    c->can_read = 0;
    /* The sends that the peer has received happened with the mutex held, in a thread that may be about to report them:
     * wait for it. */
    pthread_mutex_lock(&wire->mutex);
    pthread_mutex_unlock(&wire->mutex);
  }
  sluice_messages_hear(wire->messages, peer, &p->in);
}

/* Returns where the next byte of the message goes, and the number of bytes that fit there. */
static char* find_room(const tcp_messages_peer_t* p, uint64_t* out_room) {
  if (p->arrived < p->in.head_bytes) {
    *out_room = p->in.head_bytes - p->arrived;
    return (char*)sluice_messages_head_of(p->arrival) + p->arrived;
  }
  const uint64_t offset = p->arrived - p->in.head_bytes;
  *out_room = p->in.payload_bytes - offset;
  return (char*)sluice_messages_payload_of(p->arrival) + offset;
}

int sluice_tcp_messages_pull(tcp_wire_t* wire, int32_t peer) {
  tcp_messages_peer_t* p = &wire->peers[peer];
  sluice_tcp_connection_t* c = &wire->connections[peer];
  uint64_t turn = 0;
  while (c->can_read && c->state == SLUICE_TCP_LIVE && turn < TURN_BYTES) {
    uint64_t room;
    if (p->arrival == NULL) {
      const uint64_t n = sluice_tcp_take(c, (char*)&p->in + p->in_used, sizeof p->in - p->in_used);
      p->in_used += (uint32_t)n;
      turn += n;
      if (p->in_used == sizeof p->in) begin(wire, peer);
      if (p->arrival == NULL) continue;
    }
    if (p->arrived < p->in.head_bytes + p->in.payload_bytes) {
      char* to = find_room(p, &room);
      const uint64_t n = sluice_tcp_take(c, to, room);
      p->arrived += n;
      turn += n;
    }
    if (p->arrived < p->in.head_bytes + p->in.payload_bytes) continue;
    sluice_message_arrival_t* arrival = p->arrival;
    p->arrival = NULL;
    p->in_used = 0;
    sluice_messages_arrived(wire->messages, arrival);
  }
  return c->can_read && c->state == SLUICE_TCP_LIVE;
}
