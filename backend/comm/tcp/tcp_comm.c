/* Ranks that speak over TCP connections of Sluice's own, made through a communicator that they already share.
 *
 * One thread does everything: whoever waits moves the bytes of both requests in flight, from and to the caller's
 * buffers. There is no second thread to wake, so on a core that is busy with GEMMs a small exchange costs one
 * wake-up per message, and a large one is copied by the thread that wants it. Beside one core's GEMMs, gloo's
 * exchanges of few rows took 1 to 3 ms where these take 0.1 to 0.3 (docs/architecture.md).
 *
 * A connection carries frames in issue order, in both directions at once: a header, then the payload. What arrives
 * before this rank has started its request stays in the socket. Everything is sent as soon as the socket takes it,
 * without asking whether the peer is ready.
 *
 * Of a large message a wait is woken once for WAKE_BYTES, and for the rest, not for every packet: over a link of
 * 0.4 Gbit/s, whose packets arrive one by one, their interrupts and wake-ups took a twentieth of the core from
 * GEMMs.
 *
 * A rank that leaves with nothing outstanding says so (FRAME_BYE). A connection that ends without it means that the
 * peer died, failed or aborted: that ends every wait of this rank, also one for a third rank, which may be waiting for
 * the same loss. Who gives up for such a reason says which rank was lost (FRAME_LOST) where a frame may stand, so that
 * the others blame that one, and not the first whose connection they find closed. A machine without power or network
 * ends nothing: tcp_silence.h notices it. */
#include <errno.h>
#include <limits.h>
#include <linux/sockios.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/structs.h"
#include "backend/comm/comm.h"
#include "backend/comm/requests.h"
#include "backend/comm/tcp/tcp_connect.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_messages.h"
#include "backend/comm/tcp/tcp_silence.h"

enum { MAX_EVENTS = 64 };

#define DEFAULT_CONNECT_NS UINT64_C(30000000000)
/* A request that timed out may still complete while the other ranks reach their own deadlines: leaving at once would
 * tell them that this rank was lost, instead of which one was silent. */
#define GRACE_NS   UINT64_C(1000000000)
#define WAKE_BYTES UINT64_C(262144)     /* a fraction of a second-level cache: still there when it is copied */
#define FEW_BYTES  UINT64_C(16384)      /* one or two packets: not worth a system call */
#define LINGER_NS  UINT64_C(2000000000) /* for peers' systems to take the last bytes and the farewell */

enum { FRAME_DATA = 0x736c7531, FRAME_BYE = 0x736c7532, FRAME_LOST = 0x736c7533 };

typedef struct frame_s {
  uint32_t kind;
  uint32_t number; /* of the request; of FRAME_LOST the rank */
  uint64_t bytes;  /* of the payload that follows */
} frame_t;

/* One request's messages with one peer. */
typedef struct transfer_s {
  const char* send;
  char* recv;
  uint64_t send_left; /* of the payload */
  uint64_t recv_left;
  int32_t is_sending; /* there is a message, and not all of it is with the system */
  int32_t is_receiving;
} transfer_t;

struct sluice_comm_request_s {
  int32_t is_used;
  uint32_t number;
  int64_t pending;       /* messages not yet sent plus not yet received */
  transfer_t* transfers; /* [W] */
};

enum { PEER_LIVE = 0, PEER_LEFT, PEER_LOST };

typedef struct tcp_peer_s {
  int32_t state;
  /* Of a lost one; EPROTO: it sent something else than `expected` bytes of that request. Of a live one: what a send
   * was told, which the system says once. */
  int32_t native_error;
  uint64_t expected;
  int32_t can_read; /* not known to be empty; edges of epoll set it */
  int32_t can_write;
  int32_t low_water; /* bytes that have to be there before the socket wakes a wait */
  frame_t out;
  uint32_t out_used; /* bytes of `out` that are with the system */
  frame_t in;
  uint32_t in_used;
  sluice_tcp_silence_t silence;
} tcp_peer_t;

typedef struct tcp_comm_s {
  sluice_comm_t base;
  sluice_comm_vtable_t vtable; /* of this object: without what the parent lacks */
  sluice_comm_t* parent;
  sluice_tcp_config_t config; /* for connections that are made later; its interfaces are the next, or NULL */
  char* interfaces;
  tcp_peer_t* peers; /* [W] */
  int* sockets;      /* [W], -1 for the own rank */
  uint64_t bytes;    /* of this block */
  int epoll;
  int wake; /* eventfd: abort ends a wait with it */
  uint32_t next_number;
  int32_t lost;     /* the peer whose connection ended first, or that another rank has lost; -1 */
  int32_t has_told; /* the others which it was */
  _Atomic int32_t is_aborted;
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} tcp_comm_t;

static tcp_comm_t* downcast(sluice_comm_t* comm) { return (tcp_comm_t*)comm; }

/* ---- frames ------------------------------------------------------------------------------------------------------ */

static void lose(tcp_comm_t* comm, int32_t peer, int error) {
  tcp_peer_t* p = &comm->peers[peer];
  p->can_read = p->can_write = 0;
  if (p->state != PEER_LIVE) return;
  p->state = PEER_LOST;
  if (error != 0) p->native_error = error;
  if (comm->lost < 0) comm->lost = peer;
}

/* The sender ends its connections next, since it has lost `culprit`. */
static void hear_of_loss(tcp_comm_t* comm, int32_t peer, uint32_t culprit) {
  const int is_third = culprit < (uint32_t)comm->base.world_size && culprit != (uint32_t)comm->base.rank;
  if (comm->lost < 0 && is_third) comm->lost = (int32_t)culprit;
  lose(comm, peer, 0);
}

static int is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

/* The request whose message is next on the connection: the older one that has any left. */
static sluice_comm_request_t* next_request(tcp_comm_t* comm, int32_t peer, int is_send) {
  sluice_comm_request_t* found = NULL;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    sluice_comm_request_t* r = &comm->requests[i];
    if (!r->is_used || !(is_send ? r->transfers[peer].is_sending : r->transfers[peer].is_receiving)) continue;
    if (found == NULL || (int32_t)(r->number - found->number) < 0) found = r;
  }
  return found;
}

/* Gives the system what it takes of the messages to this peer. */
static void push(tcp_comm_t* comm, int32_t peer) {
  tcp_peer_t* p = &comm->peers[peer];
  sluice_comm_request_t* request;
  while (p->can_write && p->state == PEER_LIVE && (request = next_request(comm, peer, 1)) != NULL) {
    transfer_t* t = &request->transfers[peer];
    if (p->out_used == 0) p->out = (frame_t){.kind = FRAME_DATA, .number = request->number, .bytes = t->send_left};
    struct iovec parts[2] = {
        {.iov_base = (char*)&p->out + p->out_used, .iov_len = sizeof p->out - p->out_used},
        {.iov_base = (char*)(uintptr_t)t->send, .iov_len = t->send_left < INT_MAX ? (size_t)t->send_left : INT_MAX}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    const ssize_t n = sendmsg(comm->sockets[peer], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      p->can_write = 0;
      if (is_full(errno)) return;
      /* The peer's last words, if it left any, tell why: they are read before it counts as lost. */
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

/* Reads up to `room` bytes. 0: nothing now, or the connection has ended. */
static size_t take(tcp_comm_t* comm, int32_t peer, void* to, uint64_t room) {
  tcp_peer_t* p = &comm->peers[peer];
  for (;;) {
    const ssize_t n = recv(comm->sockets[peer], to, room < INT_MAX ? (size_t)room : INT_MAX, MSG_DONTWAIT);
    if (n > 0) return (size_t)n;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && is_full(errno)) {
      p->can_read = 0;
    } else {
      lose(comm, peer, n == 0 ? 0 : errno);
    }
    return 0;
  }
}

/* Takes what has arrived from this peer, as far as it is wanted. */
static void pull(tcp_comm_t* comm, int32_t peer) {
  tcp_peer_t* p = &comm->peers[peer];
  while (p->can_read && p->state == PEER_LIVE) {
    if (p->in_used < sizeof p->in) {
      p->in_used += (uint32_t)take(comm, peer, (char*)&p->in + p->in_used, sizeof p->in - p->in_used);
      continue;
    }
    if (p->in.kind == FRAME_BYE) {
      p->state = PEER_LEFT;
      return;
    }
    if (p->in.kind == FRAME_LOST) {
      hear_of_loss(comm, peer, p->in.number);
      return;
    }
    sluice_comm_request_t* request = next_request(comm, peer, 0);
    if (request == NULL) return; /* not asked for yet: it stays in the socket */
    transfer_t* t = &request->transfers[peer];
    if (p->in.kind != FRAME_DATA || p->in.number != request->number || p->in.bytes != t->recv_left) {
      p->expected = t->recv_left;
      lose(comm, peer, EPROTO);
      return;
    }
    const size_t n = take(comm, peer, t->recv, t->recv_left);
    t->recv += n;
    t->recv_left -= n;
    p->in.bytes -= n;
    if (t->recv_left > 0) continue;
    p->in_used = 0;
    t->is_receiving = 0;
    --request->pending;
  }
}

static void progress(tcp_comm_t* comm) {
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    if (r == comm->base.rank) continue;
    push(comm, r);
    pull(comm, r);
  }
}

/* ---- exchanges --------------------------------------------------------------------------------------------------- */

static sluice_status_t tcp_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                 sluice_comm_request_t** out_request) {
  tcp_comm_t* comm = downcast(base);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->requests);
  if (request == NULL) return sluice_comm_fail_third(base);
  request->is_used = 1;
  request->number = comm->next_number++;
  request->pending = 0;
  for (int32_t r = 0; r < base->world_size; ++r) {
    transfer_t* t = &request->transfers[r];
    memset(t, 0, sizeof *t);
    if (r == base->rank) continue;
    *t = (transfer_t){.send = exchange->send_bytes[r] > 0 ? exchange->send[r] : NULL,
                      .recv = exchange->recv_bytes[r] > 0 ? exchange->recv[r] : NULL,
                      .send_left = exchange->send_bytes[r],
                      .recv_left = exchange->recv_bytes[r],
                      .is_sending = exchange->send_bytes[r] > 0,
                      .is_receiving = exchange->recv_bytes[r] > 0};
    request->pending += t->is_sending + t->is_receiving;
  }
  /* From the next rank onwards, so that not everybody sends to rank 0 first. */
  for (int32_t step = 1; step < base->world_size; ++step) push(comm, (base->rank + step) % base->world_size);
  *out_request = request;
  return SLUICE_OK;
}

/* Tells the socket for how many bytes to wake a wait. What ends a connection, or fills its buffer, wakes all the same.
 * 1: that has changed, and as many may have come before: to be read once more, since no edge tells of them. */
static int set_low_water(tcp_comm_t* comm, int32_t peer) {
  tcp_peer_t* p = &comm->peers[peer];
  const sluice_comm_request_t* request = p->in_used == sizeof p->in ? next_request(comm, peer, 0) : NULL;
  const uint64_t left = request != NULL ? request->transfers[peer].recv_left : 0;
  const int32_t wanted = left <= FEW_BYTES ? 1 : (int32_t)(left < WAKE_BYTES ? left : WAKE_BYTES);
  if (wanted == p->low_water || p->state != PEER_LIVE) return 0;
  p->low_water = wanted;
  p->can_read = 1;
  (void)setsockopt(comm->sockets[peer], SOL_SOCKET, SO_RCVLOWAT, &wanted,
                   sizeof wanted); /* refused: woken more often */
  return 1;
}

/* Idle connections end by themselves when the peer's machine is gone, those with bytes for it only after a quarter of
 * an hour. */
static void look_for_silence(tcp_comm_t* comm) {
  const uint64_t now_ns = sluice_now_ns();
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    tcp_peer_t* p = &comm->peers[r];
    if (r == comm->base.rank || p->state != PEER_LIVE) continue;
    if (sluice_tcp_look_for_silence(comm->sockets[r], &p->silence, now_ns)) lose(comm, r, ETIMEDOUT);
  }
}

/* Marks the connections on which something may have happened; returns when something has, or at the deadline. */
static void await_events(tcp_comm_t* comm, uint64_t deadline_ns) {
  int has_changed = 0;
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    if (r != comm->base.rank) has_changed |= set_low_water(comm, r);
  }
  if (has_changed) return;
  struct epoll_event events[MAX_EVENTS];
  const uint64_t now_ns = sluice_now_ns();
  const uint64_t left_ms = deadline_ns > now_ns ? (deadline_ns - now_ns + 999999) / 1000000 : 0;
  const int n = epoll_wait(comm->epoll, events, MAX_EVENTS, left_ms > INT_MAX ? INT_MAX : (int)left_ms);
  if (n <= 0) look_for_silence(comm); /* a wait with nothing to do: comm.c cuts them into fifths of a second */
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u32 == (uint32_t)comm->base.rank) continue; /* abort woke us */
    tcp_peer_t* p = &comm->peers[events[i].data.u32];
    if ((events[i].events & ~(uint32_t)EPOLLOUT) != 0) p->can_read = 1;
    if ((events[i].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) p->can_write = 1;
  }
}

static int32_t find_peer(const tcp_comm_t* comm, const sluice_comm_request_t* request, int32_t state) {
  int32_t found = -1;
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    const transfer_t* t = &request->transfers[r];
    if (comm->peers[r].state != state) continue;
    if (t->is_receiving) return r;
    if (t->is_sending && found < 0) found = r;
  }
  return found;
}

/* What the system gives as the reason where a peer's machine did not answer. */
static int is_network(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
}

static sluice_status_t fail_lost(const tcp_comm_t* comm, int32_t peer) {
  const tcp_peer_t* p = &comm->peers[peer];
  if (p->state == PEER_LOST && p->native_error == EPROTO) {
    return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, comm->base.rank, peer,
                            "rank %d sends %llu bytes to rank %d (exchange %u), which expects %llu: the ranks disagree "
                            "on their counts; please report it",
                            peer, (unsigned long long)p->in.bytes, comm->base.rank, p->in.number,
                            (unsigned long long)p->expected);
  }
  if (p->state == PEER_LOST && is_network(p->native_error)) {
    return sluice_error_record(SLUICE_E_PEER_LOST, comm->base.rank, peer, p->native_error,
                               "rank %d lost rank %d, whose machine has answered nothing for %d s: it has no power, or "
                               "there is no network between the two. This communicator is broken: destroy it and make "
                               "a new one on all ranks. (tcp: %s)",
                               comm->base.rank, peer, SLUICE_TCP_SILENCE_S,
                               p->silence.is_silent ? "several questions in vain" : strerror(p->native_error));
  }
  const char* how = p->state == PEER_LEFT                              ? "it has left"
                    : p->state == PEER_LIVE && peer != comm->base.rank ? "another rank lost it and said so"
                    : p->native_error == 0                             ? "its connection was closed"
                                                                       : strerror(p->native_error);
  return sluice_error_record(SLUICE_E_PEER_LOST, comm->base.rank, peer, p->native_error,
                             "rank %d lost rank %d, which died or left: see its log. This communicator is broken: "
                             "destroy it and make a new one on all ranks. (tcp: %s)",
                             comm->base.rank, peer, how);
}

/* Only between frames: behind half of one it would be taken for the rest. */
static void tell_of_loss(tcp_comm_t* comm, int32_t culprit) {
  const frame_t frame = {.kind = FRAME_LOST, .number = (uint32_t)culprit};
  if (comm->has_told || culprit == comm->base.rank) return;
  comm->has_told = 1;
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    const tcp_peer_t* p = &comm->peers[r];
    if (r == comm->base.rank || r == culprit || p->state != PEER_LIVE || p->out_used > 0) continue;
    (void)send(comm->sockets[r], &frame, sizeof frame, MSG_NOSIGNAL | MSG_DONTWAIT); /* or it sees the end alone */
  }
}

/* OK while nothing stands against the request. */
static sluice_status_t check(tcp_comm_t* comm, const sluice_comm_request_t* request) {
  if (atomic_load(&comm->is_aborted)) {
    return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->base.rank, -1, "rank %d: the tcp communicator was aborted",
                            comm->base.rank);
  }
  if (comm->lost >= 0) {
    tell_of_loss(comm, comm->lost);
    return fail_lost(comm, comm->lost);
  }
  const int32_t left = find_peer(comm, request, PEER_LEFT);
  if (left < 0) return SLUICE_OK;
  tell_of_loss(comm, left);
  return fail_lost(comm, left);
}

static sluice_status_t tcp_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                int32_t* out_peer) {
  tcp_comm_t* comm = downcast(base);
  for (;;) {
    progress(comm);
    sluice_status_t status = request->pending == 0 ? SLUICE_OK : check(comm, request);
    if (status != SLUICE_OK || request->pending == 0) {
      request->is_used = 0;
      return status;
    }
    if (sluice_now_ns() >= deadline_ns) {
      if (out_peer != NULL) *out_peer = find_peer(comm, request, PEER_LIVE);
      return SLUICE_E_TIMED_OUT;
    }
    await_events(comm, deadline_ns);
  }
}

/* Nothing touches the buffers of a request outside of a wait. */
static void tcp_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  tcp_comm_t* comm = downcast(base);
  const int is_late = atomic_load(&base->broken) == SLUICE_E_TIMED_OUT;
  if (is_late && tcp_wait(base, request, sluice_now_ns() + GRACE_NS, NULL) != SLUICE_E_TIMED_OUT) return;
  request->is_used = 0;
  if (comm->lost < 0) comm->lost = base->rank; /* what is half sent cannot be followed by anything */
}

static void tcp_abort(sluice_comm_t* base) {
  tcp_comm_t* comm = downcast(base);
  const uint64_t one = 1;
  atomic_store(&comm->is_aborted, 1);
  if (write(comm->wake, &one, sizeof one) < 0) { /* full: it is awake already */
  }
  for (int32_t r = 0; r < base->world_size; ++r) {
    if (r != base->rank) (void)shutdown(comm->sockets[r], SHUT_RDWR);
  }
}

static void tcp_publish(sluice_comm_t* base, const char* key, const char* value) {
  sluice_comm_t* parent = downcast(base)->parent;
  parent->vtable->publish(parent, key, value);
}

static int32_t tcp_lookup(sluice_comm_t* base, const char* key, char* out, int32_t out_bytes) {
  sluice_comm_t* parent = downcast(base)->parent;
  return parent->vtable->lookup(parent, key, out, out_bytes);
}

static int32_t tcp_is_interrupted(sluice_comm_t* base) {
  sluice_comm_t* parent = downcast(base)->parent;
  return parent->vtable->is_interrupted(parent);
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

/* Bytes that the peer's system has not confirmed, on a connection that still stands. */
static int has_unsent(const tcp_comm_t* comm) {
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    int bytes = 0;
    if (r == comm->base.rank || comm->peers[r].state != PEER_LIVE) continue;
    struct pollfd p = {.fd = comm->sockets[r]};
    if (poll(&p, 1, 0) > 0) continue; /* closed by both sides, or broken */
    if (ioctl(comm->sockets[r], SIOCOUTQ, &bytes) == 0 && bytes > 0) return 1;
  }
  return 0;
}

/* Tells the peers that nothing is missing. A socket that is closed with bytes unread resets the connection, which would
 * take back what is still on its way to the peer: so the peers' systems have it all before that. */
static void say_goodbye(tcp_comm_t* comm) {
  const frame_t bye = {.kind = FRAME_BYE};
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    tcp_peer_t* p = &comm->peers[r];
    if (r == comm->base.rank || p->state != PEER_LIVE) continue;
    if (send(comm->sockets[r], &bye, sizeof bye, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof bye) continue;
    (void)shutdown(comm->sockets[r], SHUT_WR);
  }
  const uint64_t deadline_ns = sluice_now_ns() + LINGER_NS;
  while (has_unsent(comm) && sluice_now_ns() < deadline_ns) {
    const struct timespec pause = {.tv_nsec = 1000000};
    nanosleep(&pause, NULL);
  }
}

static void tcp_destroy(sluice_comm_t* base) {
  tcp_comm_t* comm = downcast(base);
  const int is_idle = SLUICE_REQUESTS_ARE_FREE(comm->requests);
  if (is_idle && comm->lost < 0 && atomic_load(&base->broken) == SLUICE_OK) say_goodbye(comm);
  for (int32_t r = 0; r < base->world_size; ++r) {
    sluice_tcp_close(comm->sockets[r]);
  }
  sluice_tcp_close(comm->epoll);
  sluice_tcp_close(comm->wake);
  sluice_comm_release(comm->parent);
  if (comm->interfaces != NULL) {
    sluice_free(sluice_process_allocator(), comm->interfaces, strlen(comm->interfaces) + 1);
  }
  sluice_free(sluice_process_allocator(), comm, comm->bytes);
}

/* The communicator and its arrays in one block. */
static tcp_comm_t* allocate(int32_t world_size) {
  const uint64_t w = (uint64_t)world_size;
  const uint64_t bytes =
      sizeof(tcp_comm_t) + w * (sizeof(tcp_peer_t) + SLUICE_MAX_IN_FLIGHT * sizeof(transfer_t) + sizeof(int));
  tcp_comm_t* comm = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "tcp communicator");
  if (comm == NULL) return NULL;
  comm->bytes = bytes;
  comm->epoll = comm->wake = -1;
  comm->lost = -1;
  comm->requests[0].transfers = (transfer_t*)(void*)(comm + 1);
  comm->requests[1].transfers = comm->requests[0].transfers + w;
  comm->peers = (tcp_peer_t*)(void*)(comm->requests[1].transfers + w);
  comm->sockets = (int*)(void*)(comm->peers + w);
  for (int32_t r = 0; r < world_size; ++r) {
    comm->peers[r] = (tcp_peer_t){.can_write = 1, .can_read = 1, .low_water = 1};
    comm->sockets[r] = -1;
  }
  return comm;
}

static int watch(const tcp_comm_t* comm, int fd, uint32_t events, int32_t rank) {
  struct epoll_event event = {.events = events, .data.u32 = (uint32_t)rank};
  return fd >= 0 && epoll_ctl(comm->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static sluice_status_t prepare_events(tcp_comm_t* comm) {
  comm->epoll = sluice_tcp_open_epoll();
  comm->wake = sluice_tcp_open_eventfd();
  if (comm->epoll >= 0 && watch(comm, comm->wake, EPOLLIN, comm->base.rank)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_FOREIGN, "tcp communicator: rank %d cannot make an epoll: %s", comm->base.rank,
                     strerror(errno));
}

static sluice_status_t watch_peers(tcp_comm_t* comm) {
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    if (r == comm->base.rank || watch(comm, comm->sockets[r], EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, r)) continue;
    return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "tcp communicator: rank %d cannot watch its connection to rank %d: %s",
                       comm->base.rank, r, strerror(errno));
  }
  return SLUICE_OK;
}

static sluice_status_t read_config(const sluice_tcp_config_t* config, sluice_tcp_config_t* out_config) {
  sluice_tcp_config_init(out_config, sizeof *out_config);
  if (config != NULL) {
    SLUICE_TRY(sluice_struct_copy(out_config, sizeof *out_config, config,
                                  offsetof(sluice_tcp_config_t, connect_timeout_ns), "sluice_tcp_config_t"));
  }
  if (out_config->next != NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_tcp_config_t.next: no optional block is known here (got type %d); pass NULL",
                       out_config->next->type);
  }
  if (out_config->connect_timeout_ns == 0) out_config->connect_timeout_ns = DEFAULT_CONNECT_NS;
  return SLUICE_OK;
}

/* The caller's string may be gone when messages are opened. */
static sluice_status_t keep_config(tcp_comm_t* comm, const sluice_tcp_config_t* config) {
  comm->config = *config;
  comm->config.interfaces = NULL;
  if (config->interfaces == NULL) return SLUICE_OK;
  const uint64_t bytes = strlen(config->interfaces) + 1;
  comm->interfaces = sluice_alloc(sluice_process_allocator(), bytes, "names of interfaces");
  if (comm->interfaces == NULL) return sluice_alloc_status();
  memcpy(comm->interfaces, config->interfaces, bytes);
  comm->config.interfaces = comm->interfaces;
  return SLUICE_OK;
}

static sluice_status_t tcp_messages_open(sluice_comm_t* base, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  return sluice_tcp_messages_open(base, &downcast(base)->config, messages, out_wire);
}

sluice_status_t sluice_comm_create_tcp(sluice_comm_t* parent, const sluice_tcp_config_t* config,
                                       sluice_comm_t** out_comm) {
  if (out_comm == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_tcp: out_comm is NULL");
  *out_comm = NULL;
  if (parent == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_tcp: parent is NULL");
  tcp_comm_t* comm = allocate(parent->world_size);
  if (comm == NULL) {
    sluice_comm_abort(parent); /* the others would wait for this rank's address */
    return SLUICE_E_NO_MEMORY;
  }
  const sluice_comm_config_t base = {.rank = parent->rank,
                                     .world_size = parent->world_size,
                                     .timeout_ns = parent->timeout_ns,
                                     .warn_ns = parent->warn_ns};
  comm->vtable = (sluice_comm_vtable_t){
      .destroy = tcp_destroy,
      .exchange_start = tcp_start,
      .exchange_wait = tcp_wait,
      .abort = tcp_abort,
      .is_interrupted = parent->vtable->is_interrupted != NULL ? tcp_is_interrupted : NULL,
      .abandon = tcp_abandon,
      .messages_open = tcp_messages_open,
      .publish = parent->vtable->publish != NULL ? tcp_publish : NULL,
      .lookup = parent->vtable->lookup != NULL ? tcp_lookup : NULL,
  };
  sluice_comm_init_base(&comm->base, &comm->vtable, "tcp", &base);
  sluice_comm_retain(parent);
  comm->parent = parent;
  /* What fails on one rank alone is told to the others when they connect. */
  sluice_tcp_config_t c;
  sluice_status_t status = read_config(config, &c);
  if (status == SLUICE_OK) status = keep_config(comm, &c);
  if (status == SLUICE_OK) status = prepare_events(comm);
  status = sluice_tcp_connect(parent, &comm->config, status, comm->sockets);
  if (status == SLUICE_OK) {
    status = watch_peers(comm);
    if (status != SLUICE_OK) sluice_comm_abort(parent); /* the others have agreed that all connections stand */
  }
  if (status != SLUICE_OK) {
    atomic_store(&comm->base.broken, status); /* no farewell */
    tcp_destroy(&comm->base);
    return status;
  }
  *out_comm = &comm->base;
  return SLUICE_OK;
}

void sluice_tcp_config_init(sluice_tcp_config_t* out_config, size_t struct_size) {
  sluice_struct_init(out_config, struct_size, NULL, 0);
}
