// SPDX-License-Identifier: Apache-2.0
/* The thread that moves messages, and the calls of the endpoint. */
#include "backend/comm/tcp/tcp_messages.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/tcp/tcp_descriptors.h"

enum { MAX_EVENTS = 64, LOOK_MS = 1000 };

#define LOOK_NS      (UINT64_C(1000000) * LOOK_MS)
#define INLINE_BYTES UINT64_C(65536) /* sending more costs the caller more than waking this thread */

static tcp_wire_t* downcast(sluice_wire_t* wire) { return (tcp_wire_t*)wire; }

/* ---- losses ------------------------------------------------------------------------------------------------------ */

/* Returns a lost peer. If several connections have ended, prefers one that ended between messages: a rank that gives up
 * because of another one says so, unless half of a message is in the way. has_more: not everything has been read, so
 * for a connection that ended within a message the cause may still be found. */
static int32_t find_lost(const tcp_wire_t* wire, int has_more) {
  int32_t found = -1;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    const tcp_messages_peer_t* p = &wire->peers[r];
    if (wire->connections[r].state != SLUICE_TCP_LOST) continue;
    if (p->arrival == NULL && p->in_used == 0) return r;
    if (found < 0 && !has_more) found = r;
  }
  return found;
}

static void fail_if_lost(tcp_wire_t* wire, int has_more) {
  const int32_t lost = find_lost(wire, has_more);
  if (lost < 0 || sluice_messages_has_failed(wire->messages)) return;
  const int end = wire->connections[lost].native_error;
  pthread_mutex_lock(&wire->mutex);
  const int error = end != 0 ? end : wire->peers[lost].out_error;
  pthread_mutex_unlock(&wire->mutex);
  (void)sluice_messages_record_loss(wire->messages, lost, error,
                                    error == 0 ? "its connection was closed"
                                    : sluice_tcp_is_network(error)
                                        ? "its machine does not respond: it is down, or the network is"
                                        : strerror(error));
  sluice_messages_fail(wire->messages, lost);
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
    sluice_tcp_note_events(&wire->connections[events[i].data.u32], events[i].events);
  }
  pthread_mutex_unlock(&wire->mutex);
}

static void await_events(tcp_wire_t* wire, int is_dead, int is_waiting) {
  int has_changed = 0;
  for (int32_t r = 0; r < wire->world_size && !is_dead; ++r) {
    const tcp_messages_peer_t* p = &wire->peers[r];
    const uint64_t left = p->arrival != NULL ? p->in.head_bytes + p->in.payload_bytes - p->arrived : 0;
    if (r != wire->rank) has_changed |= sluice_tcp_set_low_water(&wire->connections[r], left);
  }
  if (has_changed) return;
  struct epoll_event events[MAX_EVENTS];
  const int n = epoll_wait(wire->epoll, events, MAX_EVENTS, is_dead ? -1 : is_waiting ? SLUICE_TCP_TURN_MS : LOOK_MS);
  if (n > 0) note_events(wire, events, n);
  if (n != 0 || is_dead || (is_waiting && sluice_now_ns() - wire->looked_ns < LOOK_NS)) return;
  wire->looked_ns = sluice_now_ns();
  sluice_tcp_lose_silent(wire->connections, wire->world_size);
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
  const int was_idle = sluice_list_first(&p->queue) == NULL;
  const int is_small = out->frame.head_bytes + out->frame.payload_bytes <= INLINE_BYTES;
  const int32_t peer = out->peer;
  if (!wire->is_dead) sluice_list_append(&p->queue, &out->place);
  if (was_idle && is_small) sluice_tcp_messages_push(wire, peer);
  /* A full socket wakes the thread itself, and the thread checks a peer with pending messages in any case. */
  const int is_for_thread = was_idle && sluice_list_first(&p->queue) != NULL && wire->connections[peer].can_write;
  pthread_mutex_unlock(&wire->mutex);
  if (is_for_thread) sluice_tcp_wake(wire->wake);
}

static int32_t tcp_cancel(sluice_wire_t* base, int32_t peer, uint64_t number) {
  tcp_wire_t* wire = downcast(base);
  pthread_mutex_lock(&wire->mutex);
  const int32_t is_back = sluice_outgoing_cancel(&wire->peers[peer].queue, number);
  pthread_mutex_unlock(&wire->mutex);
  return is_back;
}

static void tcp_give_way(sluice_wire_t* base, int32_t gives_way) {
  tcp_wire_t* wire = downcast(base);
  pthread_mutex_lock(&wire->mutex);
  wire->gives_way = gives_way;
  for (int32_t r = 0; r < wire->world_size; ++r) {
    if (r != wire->rank) sluice_tcp_set_gives_way(wire->connections[r].socket, gives_way);
  }
  pthread_mutex_unlock(&wire->mutex);
  sluice_tcp_wake(wire->wake);
}

/* Returns whether a frame may start on the connection now. */
static int is_between(const tcp_messages_peer_t* p) {
  const sluice_outgoing_t* first = sluice_outgoing_first(&p->queue);
  return first == NULL || first->progress == 0;
}

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
    sluice_tcp_connection_t* c = &wire->connections[r];
    if (r == wire->rank) continue;
    if (culprit == wire->rank) {
      (void)shutdown(c->socket, SHUT_RDWR);
    } else if (is_between(p) && sluice_tcp_send_lost_rank(c->socket, &lost, sizeof lost)) {
      (void)shutdown(c->socket, SHUT_WR);
      c->is_told = 1;
    }
    sluice_list_init(&p->queue);
  }
  pthread_mutex_unlock(&wire->mutex);
  sluice_tcp_wake(wire->wake);
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

/* A connection with half of a message ends without a farewell. */
static void say_goodbye(tcp_wire_t* wire) {
  const sluice_frame_t leaves = {.kind = SLUICE_FRAME_LEAVES};
  for (int32_t r = 0; r < wire->world_size; ++r) {
    if (!is_between(&wire->peers[r])) sluice_tcp_lose(&wire->connections[r], 0);
  }
  sluice_tcp_say_goodbye(wire->connections, wire->world_size, &leaves, sizeof leaves);
}

static void tcp_close(sluice_wire_t* base, int32_t is_orderly) {
  tcp_wire_t* wire = downcast(base);
  if (wire->is_open) {
    pthread_mutex_lock(&wire->mutex);
    wire->is_closing = 1;
    pthread_mutex_unlock(&wire->mutex);
    sluice_tcp_wake(wire->wake);
    pthread_join(wire->thread, NULL);
    if (is_orderly) {
      say_goodbye(wire);
    } else {
      sluice_tcp_part(wire->connections, wire->world_size);
    }
  }
  for (int32_t r = 0; r < wire->world_size; ++r) {
    sluice_messages_drop(wire->messages, wire->peers[r].arrival);
    sluice_tcp_close(wire->connections[r].socket);
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

static sluice_status_t prepare(tcp_wire_t* wire) {
  wire->epoll = sluice_tcp_open_epoll();
  wire->wake = sluice_tcp_open_eventfd();
  if (wire->epoll >= 0 && sluice_tcp_watch(wire->epoll, wire->wake, EPOLLIN, wire->rank)) return SLUICE_OK;
  return fail_system(wire, "cannot make an epoll", errno);
}

/* The thread blocks all signals: those of the process are for its own threads. */
static sluice_status_t start(tcp_wire_t* wire) {
  sigset_t all, old;
  if (sluice_tcp_watch_all(wire->epoll, wire->connections, wire->world_size) < wire->world_size) {
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
  const uint64_t bytes = sizeof(tcp_wire_t) + w * (sizeof(tcp_messages_peer_t) + sizeof(sluice_tcp_connection_t));
  tcp_wire_t* wire = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "messages over tcp");
  if (wire == NULL) return NULL;
  wire->base.vtable = &vtable;
  wire->messages = messages;
  wire->rank = comm->rank;
  wire->world_size = comm->world_size;
  wire->bytes = bytes;
  wire->epoll = wire->wake = -1;
  wire->connections = (sluice_tcp_connection_t*)(void*)(wire->peers + w);
  sluice_tcp_connections_init(wire->connections, comm->world_size);
  for (int32_t r = 0; r < comm->world_size; ++r) sluice_list_init(&wire->peers[r].queue);
  pthread_mutex_init(&wire->mutex, NULL);
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
  sluice_status_t status = sluice_tcp_connect(comm, way, prepare(wire), wire->connections);
  *out_wire = &wire->base; /* set before the thread starts, which may fail the endpoint, which calls this wire */
  if (status == SLUICE_OK) status = start(wire);
  if (status == SLUICE_OK) return SLUICE_OK;
  tcp_close(&wire->base, 0);
  *out_wire = NULL;
  return status;
}
