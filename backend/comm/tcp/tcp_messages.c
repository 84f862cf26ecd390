// SPDX-License-Identifier: Apache-2.0
/* The thread that moves messages, and the calls of the endpoint. */
#include "backend/comm/tcp/tcp_messages.h"

#include <errno.h>
#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/tcp/tcp_descriptors.h"

enum { MAX_EVENTS = 64, LOOK_MS = 1000 };

#define LOOK_NS      (UINT64_C(1000000) * LOOK_MS)
#define LINGER_NS    UINT64_C(2000000000) /* for peers' systems to receive the last bytes and the farewell */
#define INLINE_BYTES UINT64_C(65536)      /* sending more costs the caller more than waking this thread */

static tcp_wire_t* downcast(sluice_wire_t* wire) { return (tcp_wire_t*)wire; }

static void wake(const tcp_wire_t* wire) {
  const uint64_t one = 1;
  if (write(wire->wake, &one, sizeof one) < 0) { /* full: it has been woken already */
  }
}

/* ---- losses ------------------------------------------------------------------------------------------------------ */

static int is_network(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
}

/* Returns a lost peer. If several connections have ended, prefers one that ended between messages: a rank that gives up
 * because of another one says so, unless half of a message is in the way. has_more: not everything has been read, so
 * for a connection that ended within a message the cause may still be found. */
static int32_t find_lost(const tcp_wire_t* wire, int has_more) {
  int32_t found = -1;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    const tcp_messages_peer_t* p = &wire->peers[r];
    if (p->state != TCP_PEER_LOST) continue;
    if (p->arrival == NULL && p->in_used == 0) return r;
    if (found < 0 && !has_more) found = r;
  }
  return found;
}

static void fail_if_lost(tcp_wire_t* wire, int has_more) {
  const int32_t lost = find_lost(wire, has_more);
  if (lost < 0 || sluice_messages_has_failed(wire->messages)) return;
  tcp_messages_peer_t* p = &wire->peers[lost];
  pthread_mutex_lock(&wire->mutex);
  const int error = p->native_error != 0 ? p->native_error : p->out_error;
  pthread_mutex_unlock(&wire->mutex);
  (void)sluice_messages_record_loss(wire->messages, lost, error,
                                    error == 0          ? "its connection was closed"
                                    : is_network(error) ? "its machine does not respond: it is down, or the network is"
                                                        : strerror(error));
  sluice_messages_fail(wire->messages, lost);
}

static void look_for_silence(tcp_wire_t* wire) {
  const uint64_t now_ns = wire->looked_ns = sluice_now_ns();
  for (int32_t r = 0; r < wire->world_size; ++r) {
    tcp_messages_peer_t* p = &wire->peers[r];
    if (r == wire->rank || p->state != TCP_PEER_LIVE) continue;
    if (!sluice_tcp_check_keepalive(p->socket, &p->silence, now_ns)) continue;
    p->state = TCP_PEER_LOST;
    p->native_error = ETIMEDOUT;
  }
}

/* ---- the thread -------------------------------------------------------------------------------------------------- */

static void note_events(tcp_wire_t* wire, const struct epoll_event* events, int n) {
  pthread_mutex_lock(&wire->mutex);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u32 == (uint32_t)wire->rank) {
      uint64_t count;
      if (read(wire->wake, &count, sizeof count) < 0) { /* it was read before */
      }
      continue;
    }
    tcp_messages_peer_t* p = &wire->peers[events[i].data.u32];
    if ((events[i].events & ~(uint32_t)EPOLLOUT) != 0) p->can_read = 1;
    if ((events[i].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) p->can_write = 1;
  }
  pthread_mutex_unlock(&wire->mutex);
}

static void await_events(tcp_wire_t* wire, int is_dead, int is_waiting) {
  int has_changed = 0;
  for (int32_t r = 0; r < wire->world_size && !is_dead; ++r) {
    if (r != wire->rank) has_changed |= sluice_tcp_messages_set_low_water(&wire->peers[r]);
  }
  if (has_changed) return;
  struct epoll_event events[MAX_EVENTS];
  const int n = epoll_wait(wire->epoll, events, MAX_EVENTS, is_dead ? -1 : is_waiting ? SLUICE_TCP_TURN_MS : LOOK_MS);
  if (n > 0) note_events(wire, events, n);
  if (n == 0 && !is_dead && (!is_waiting || sluice_now_ns() - wire->looked_ns >= LOOK_NS)) look_for_silence(wire);
}

static void* run(void* argument) {
  tcp_wire_t* wire = argument;
  for (;;) {
    int has_more = 0;
    pthread_mutex_lock(&wire->mutex);
    const int is_dead = wire->is_dead, is_closing = wire->is_closing;
    wire->is_waiting = 0;
    for (int32_t r = 0; r < wire->world_size && !is_dead && !is_closing; ++r) {
      if (r != wire->rank) sluice_tcp_messages_push(wire, r);
    }
    const int is_waiting = wire->is_waiting;
    pthread_mutex_unlock(&wire->mutex);
    if (is_closing) return NULL;
    for (int32_t r = 0; r < wire->world_size && !is_dead; ++r) {
      if (r != wire->rank) has_more |= sluice_tcp_messages_pull(wire, r);
    }
    if (!is_dead) fail_if_lost(wire, has_more);
    if (!has_more || is_dead) await_events(wire, is_dead, is_waiting);
  }
}

/* ---- what the endpoint calls ------------------------------------------------------------------------------------- */

static void tcp_send(sluice_wire_t* base, sluice_outgoing_t* out) {
  tcp_wire_t* wire = downcast(base);
  pthread_mutex_lock(&wire->mutex);
  tcp_messages_peer_t* p = &wire->peers[out->peer];
  const int was_idle = p->first == NULL;
  const int is_small = out->frame.head_bytes + out->frame.payload_bytes <= INLINE_BYTES;
  const int32_t peer = out->peer;
  out->next = NULL;
  if (was_idle) {
    p->first = out;
  } else {
    p->last->next = out;
  }
  p->last = out;
  if (wire->is_dead) p->first = p->last = NULL;
  if (was_idle && is_small) sluice_tcp_messages_push(wire, peer);
  /* A full socket wakes the thread itself, and the thread checks a peer with pending messages in any case. */
  const int is_for_thread = was_idle && p->first != NULL && p->can_write;
  pthread_mutex_unlock(&wire->mutex);
  if (is_for_thread) wake(wire);
}

static int32_t tcp_cancel(sluice_wire_t* base, int32_t peer, uint64_t number) {
  tcp_wire_t* wire = downcast(base);
  int32_t is_back = 0;
  pthread_mutex_lock(&wire->mutex);
  tcp_messages_peer_t* p = &wire->peers[peer];
  sluice_outgoing_t* before = NULL;
  for (sluice_outgoing_t* out = p->first; out != NULL && !is_back; before = out, out = out->next) {
    if (out->number != number || out->progress > 0) continue;
    *(before != NULL ? &before->next : &p->first) = out->next;
    if (p->last == out) p->last = before;
    is_back = 1;
  }
  pthread_mutex_unlock(&wire->mutex);
  return is_back;
}

static void tcp_give_way(sluice_wire_t* base, int32_t gives_way) {
  tcp_wire_t* wire = downcast(base);
  pthread_mutex_lock(&wire->mutex);
  wire->gives_way = gives_way;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    if (r != wire->rank) sluice_tcp_set_gives_way(wire->peers[r].socket, gives_way);
  }
  pthread_mutex_unlock(&wire->mutex);
  wake(wire);
}

/* Returns whether a frame may start on the connection now. */
static int is_between(const tcp_messages_peer_t* p) { return p->first == NULL || p->first->progress == 0; }

/* If this rank is not at fault, it tells the peers so. A connection that cannot take this frame, because half of a
 * message is on it or it is full, stays open until close, and there until the peer has found the lost rank by itself:
 * the peer would otherwise take this rank for the lost one. */
static void tcp_fail(sluice_wire_t* base, int32_t culprit) {
  tcp_wire_t* wire = downcast(base);
  const sluice_frame_t lost = {.kind = SLUICE_FRAME_LOST, .tag = (uint64_t)culprit};
  pthread_mutex_lock(&wire->mutex);
  wire->is_dead = 1;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    tcp_messages_peer_t* p = &wire->peers[r];
    if (r == wire->rank) continue;
    if (culprit == wire->rank) {
      (void)shutdown(p->socket, SHUT_RDWR);
    } else if (is_between(p) && sluice_tcp_send_lost_rank(p->socket, &lost, sizeof lost)) {
      (void)shutdown(p->socket, SHUT_WR);
      p->is_told = 1;
    }
    p->first = p->last = NULL;
  }
  pthread_mutex_unlock(&wire->mutex);
  wake(wire);
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

/* Sends this rank's farewell to one peer, as far as the socket accepts it. Returns 1 if there is nothing left to wait
 * for. */
static int say_goodbye(tcp_messages_peer_t* p) {
  const sluice_frame_t leaves = {.kind = SLUICE_FRAME_LEAVES};
  int bytes = 0;
  struct pollfd ended = {.fd = p->socket};
  if (p->state != TCP_PEER_LIVE || !is_between(p) || poll(&ended, 1, 0) > 0) return 1;
  if (p->said < sizeof leaves) {
    const ssize_t n =
        send(p->socket, (const char*)&leaves + p->said, sizeof leaves - p->said, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return 1;
    if (n > 0) p->said += (uint32_t)n;
    if (p->said < sizeof leaves) return 0;
    (void)shutdown(p->socket, SHUT_WR);
  }
  /* Closing a socket with unread bytes resets the connection and discards what is in flight. */
  return ioctl(p->socket, SIOCOUTQ, &bytes) != 0 || bytes == 0;
}

static void say_goodbye_to_all(tcp_wire_t* wire) {
  const uint64_t deadline_ns = sluice_now_ns() + LINGER_NS;
  for (int is_over = 0; !is_over && sluice_now_ns() < deadline_ns;) {
    is_over = 1;
    for (int32_t r = 0; r < wire->world_size; ++r) {
      if (r != wire->rank && !say_goodbye(&wire->peers[r])) is_over = 0;
    }
    const struct timespec pause = {.tv_nsec = 1000000};
    if (!is_over) nanosleep(&pause, NULL);
  }
}

/* Call after a loss for which another rank is at fault. */
static void part_from_all(tcp_wire_t* wire) {
  const uint64_t begin_ns = sluice_now_ns();
  int is_over;
  do {
    is_over = 1;
    for (int32_t r = 0; r < wire->world_size; ++r) {
      const tcp_messages_peer_t* p = &wire->peers[r];
      if (r == wire->rank || p->state != TCP_PEER_LIVE) continue;
      if (!sluice_tcp_is_shut_down(p->socket, p->is_told)) is_over = 0;
    }
  } while (!is_over && sluice_tcp_shutdown_goes_on(begin_ns));
}

static void tcp_close(sluice_wire_t* base, int32_t is_orderly) {
  tcp_wire_t* wire = downcast(base);
  if (wire->is_open) {
    pthread_mutex_lock(&wire->mutex);
    wire->is_closing = 1;
    pthread_mutex_unlock(&wire->mutex);
    wake(wire);
    pthread_join(wire->thread, NULL);
    if (is_orderly) {
      say_goodbye_to_all(wire);
    } else {
      part_from_all(wire);
    }
  }
  for (int32_t r = 0; r < wire->world_size; ++r) {
    sluice_messages_drop(wire->messages, wire->peers[r].arrival);
    sluice_tcp_close(wire->peers[r].socket);
  }
  sluice_tcp_close(wire->epoll);
  sluice_tcp_close(wire->wake);
  pthread_mutex_destroy(&wire->mutex);
  sluice_free(sluice_process_allocator(), wire, wire->bytes);
}

static sluice_status_t fail_system(const tcp_wire_t* wire, const char* what, int error) {
  return sluice_error_record(SLUICE_E_EXTERNAL, wire->rank, -1, error, "messages over tcp: rank %d %s: %s", wire->rank,
                             what, strerror(error));
}

static int watch(const tcp_wire_t* wire, int fd, uint32_t events, int32_t rank) {
  struct epoll_event event = {.events = events, .data.u32 = (uint32_t)rank};
  return fd >= 0 && epoll_ctl(wire->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static sluice_status_t prepare(tcp_wire_t* wire) {
  wire->epoll = sluice_tcp_open_epoll();
  wire->wake = sluice_tcp_open_eventfd();
  if (wire->epoll >= 0 && watch(wire, wire->wake, EPOLLIN, wire->rank)) return SLUICE_OK;
  return fail_system(wire, "cannot make an epoll", errno);
}

/* The thread blocks all signals: those of the process are for its own threads. */
static sluice_status_t start(tcp_wire_t* wire) {
  sigset_t all, old;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    if (r == wire->rank || watch(wire, wire->peers[r].socket, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, r)) continue;
    return fail_system(wire, "cannot watch its connections", errno);
  }
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  const int error = pthread_create(&wire->thread, NULL, run, wire);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (error != 0) return fail_system(wire, "cannot start a thread for them", error);
  wire->is_open = 1;
  return SLUICE_OK;
}

static tcp_wire_t* allocate(const sluice_comm_t* comm, sluice_messages_t* messages) {
  static const sluice_wire_vtable_t vtable = {
      .send = tcp_send, .cancel = tcp_cancel, .give_way = tcp_give_way, .fail = tcp_fail, .close = tcp_close};
  const uint64_t w = (uint64_t)comm->world_size;
  const uint64_t bytes = sizeof(tcp_wire_t) + w * (sizeof(tcp_messages_peer_t) + sizeof(int));
  tcp_wire_t* wire = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "messages over tcp");
  if (wire == NULL) return NULL;
  wire->base.vtable = &vtable;
  wire->messages = messages;
  wire->rank = comm->rank;
  wire->world_size = comm->world_size;
  wire->bytes = bytes;
  wire->epoll = wire->wake = -1;
  wire->sockets = (int*)(void*)(wire->peers + w);
  pthread_mutex_init(&wire->mutex, NULL);
  for (int32_t r = 0; r < comm->world_size; ++r) {
    wire->peers[r] = (tcp_messages_peer_t){.socket = -1, .can_write = 1, .can_read = 1, .low_water = 1};
  }
  return wire;
}

/* A failure on one rank alone before the connections is told to the other ranks with them. */
sluice_status_t sluice_tcp_messages_open(sluice_comm_t* comm, const sluice_tcp_way_t* way, sluice_messages_t* messages,
                                         sluice_wire_t** out_wire) {
  *out_wire = NULL;
  tcp_wire_t* wire = allocate(comm, messages);
  if (wire == NULL) {
    sluice_comm_abort(comm); /* the other ranks would wait for this rank's address */
    return sluice_alloc_status();
  }
  sluice_status_t status = sluice_tcp_connect(comm, way, prepare(wire), wire->sockets);
  for (int32_t r = 0; r < comm->world_size; ++r) wire->peers[r].socket = wire->sockets[r];
  *out_wire = &wire->base; /* set before the thread starts, which may fail the endpoint, which calls this wire */
  if (status == SLUICE_OK) status = start(wire);
  if (status == SLUICE_OK) return SLUICE_OK;
  tcp_close(&wire->base, 0);
  *out_wire = NULL;
  return status;
}
