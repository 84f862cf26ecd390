// SPDX-License-Identifier: Apache-2.0
/* Connects all ranks of a group. One thread polls all accepted connections and attempts that are not yet proved to
 * belong to the group, so a slow or silent peer delays no other.
 *
 * A rank may have several addresses, and another machine may answer at some of them (private networks overlap). They
 * are tried one shortly after the other, and the first at which that rank proves itself is kept. All are retried until
 * the deadline: a rank may start late, a network may come up late. */
#include "backend/comm/tcp/tcp_connect.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_hello.h"

#define MS_NS UINT64_C(1000000)
/* The time after which the next address is tried as well if one has not answered. */
#define NEXT_ADDRESS_NS (250 * MS_NS)
/* The time that a connection has for its hello, or for an answer; doubled in each round of addresses, so that distant
 * or busy ranks are reached too. */
#define HELLO_NS  (3000 * MS_NS)
#define MAX_ROUND 4
/* If descriptors run out, strangers of this age are closed to accept others. */
#define OLD_NS   (250 * MS_NS)
#define PAUSE_NS (20 * MS_NS)

enum {
  MAX_ATTEMPTS = SLUICE_TCP_MAX_ADDRESSES + 1, /* including loopback */
  /* Unknown connections in addition to those of the group; beyond that, the oldest is closed. */
  MAX_STRANGERS = 256,
  MAX_ACCEPTED_AT_ONCE = 32
};

/* The attempts to reach one lower rank. */
typedef struct route_s {
  int32_t attempt; /* the next one */
  int32_t round;
  int32_t is_found; /* the rank has proved itself at one address: that connection is kept */
  uint64_t next_ns;
  int errors[MAX_ATTEMPTS]; /* of the last attempt at each address: as sluice_tcp_hello_advance returns; 0: never tried
                             */
} route_t;

struct sluice_tcp_mesh_s {
  sluice_tcp_group_t group;
  uint64_t bytes; /* of this block */
  int32_t capacity;
  int32_t missing; /* number of ranks */
  int shortage;    /* EMFILE or ENFILE, if it occurred */
  uint64_t deadline_ns;
  uint64_t accept_ns;                   /* earliest time of the next accept */
  sluice_tcp_connection_t* connections; /* the caller's */
  const sluice_tcp_listeners_t* listeners;
  route_t* routes;            /* [rank] */
  sluice_tcp_hellos_t hellos; /* [capacity] */
  struct pollfd* polls;       /* [SLUICE_TCP_MAX_ADDRESSES + capacity]: listeners, then hellos in order */
  int32_t num_listeners;      /* of the last poll */
};

/* Returns a capacity that suffices if each higher rank connects to all addresses of this one at once while this one is
 * busy: none of them has to be closed. */
static int32_t most_accepted(int32_t rank, int32_t world_size) {
  return MAX_STRANGERS + (world_size - rank) * MAX_ATTEMPTS;
}

sluice_status_t sluice_tcp_mesh_create(int32_t rank, int32_t world_size, sluice_tcp_mesh_t** out_meeting) {
  const int32_t capacity = most_accepted(rank, world_size) + rank * MAX_ATTEMPTS;
  const uint64_t routes = (uint64_t)rank * sizeof(route_t), hellos = (uint64_t)capacity * sizeof(sluice_tcp_hello_t);
  const uint64_t polls = (uint64_t)(capacity + SLUICE_TCP_MAX_ADDRESSES) * sizeof(struct pollfd);
  const uint64_t bytes = sizeof(sluice_tcp_mesh_t) + routes + hellos + polls;
  sluice_tcp_mesh_t* m = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "connections of the tcp communicator");
  *out_meeting = m;
  if (m == NULL) return sluice_alloc_status();
  m->bytes = bytes;
  m->capacity = capacity;
  m->group = (sluice_tcp_group_t){.rank = rank, .world_size = world_size};
  m->hellos.list = (sluice_tcp_hello_t*)(void*)(m + 1);
  m->routes = (route_t*)(void*)(m->hellos.list + capacity);
  m->polls = (struct pollfd*)(void*)(m->routes + rank);
  return SLUICE_OK;
}

void sluice_tcp_mesh_destroy(sluice_tcp_mesh_t* meeting) {
  if (meeting != NULL) sluice_free(sluice_process_allocator(), meeting, meeting->bytes);
}

/* ---- the list of connections ------------------------------------------------------------------------------------- */

static int is_shortage(int error) { return error == EMFILE || error == ENFILE; }

static sluice_tcp_hello_t* find_attempt(const sluice_tcp_mesh_t* m, int32_t peer, int32_t attempt) {
  for (int32_t i = 0; i < m->hellos.count; ++i) {
    if (m->hellos.list[i].attempt == attempt && m->hellos.list[i].peer == peer) return &m->hellos.list[i];
  }
  return NULL;
}

/* ---- routes to lower ranks --------------------------------------------------------------------------------------- */

static socklen_t target_of(const sluice_tcp_mesh_t* m, int32_t peer, int32_t attempt,
                           struct sockaddr_storage* out_target) {
  const sluice_tcp_card_t* cards = m->group.cards;
  return sluice_tcp_card_target(&cards[m->group.rank], &cards[peer], attempt, out_target);
}

/* Advances to the next address, or round. */
static void set_next(const sluice_tcp_mesh_t* m, int32_t peer, uint64_t now_ns, int has_failed) {
  struct sockaddr_storage unused;
  route_t* route = &m->routes[peer];
  route->next_ns = has_failed ? now_ns : now_ns + NEXT_ADDRESS_NS;
  if (target_of(m, peer, ++route->attempt, &unused) > 0) return;
  route->attempt = 0;
  route->next_ns = now_ns + (NEXT_ADDRESS_NS << sluice_min_u64((uint64_t)route->round++, MAX_ROUND));
}

/* Tries the next address of this rank, unless it is being tried. Returns -errno of an error that no other address would
 * avoid. */
static int try_next(sluice_tcp_mesh_t* m, int32_t peer, uint64_t now_ns) {
  route_t* route = &m->routes[peer];
  struct sockaddr_storage target;
  const int32_t attempt = route->attempt;
  const socklen_t length = target_of(m, peer, attempt, &target);
  int error = 0;
  if (length > 0 && find_attempt(m, peer, attempt) == NULL) {
    sluice_tcp_hello_t hello;
    error = sluice_tcp_hello_connect(&m->group, peer, &target, length, &hello);
    if (is_shortage(-error)) {
      m->shortage = -error;
      if (sluice_tcp_hellos_turn_out_oldest(&m->hellos, 0, now_ns)) return 0; /* and retry at once */
      return error;
    }
    hello.attempt = attempt;
    const uint64_t limit_ns = HELLO_NS << sluice_min_u64((uint64_t)route->round, MAX_ROUND);
    if (error == 0) sluice_tcp_hellos_add(&m->hellos, &hello, now_ns, limit_ns);
    route->errors[attempt] = error;
  }
  set_next(m, peer, now_ns, error != 0);
  return 0;
}

static void settle_on(sluice_tcp_mesh_t* m, int32_t peer, int kept) {
  m->routes[peer].is_found = 1;
  for (int32_t i = m->hellos.count - 1; i >= 0; --i) {
    const sluice_tcp_hello_t* h = &m->hellos.list[i];
    if (h->attempt >= 0 && h->peer == peer && h->fd != kept) sluice_tcp_close(sluice_tcp_hellos_remove(&m->hellos, i));
  }
}

/* ---- progress of connections ------------------------------------------------------------------------------------- */

static void keep(sluice_tcp_mesh_t* m, int32_t peer, int fd) {
  int* socket = &m->connections[peer].socket;
  if (*socket >= 0) {
    sluice_tcp_close(*socket); /* it connected again, with a new proof: it has lost that connection */
  } else {
    --m->missing;
  }
  *socket = fd;
}

static void note_failure(sluice_tcp_mesh_t* m, const sluice_tcp_hello_t* h, int what, uint64_t now_ns) {
  if (h->attempt < 0) return;
  route_t* route = &m->routes[h->peer];
  route->errors[h->attempt] = what;
  if (h->phase == SLUICE_TCP_AWAITS_WELCOME) route->is_found = 0;
  if (route->attempt > h->attempt) route->next_ns = now_ns; /* another address of this round is left */
}

/* Advances the connections that poll reported, or whose time is over, from the last to the first: a removed entry is
 * replaced by one that has been handled. The others are skipped: with hundreds of ranks, one system call for each of
 * them after every event would take longer than everything else. */
static void advance_all(sluice_tcp_mesh_t* m) {
  const uint64_t now_ns = sluice_now_ns();
  for (int32_t i = m->hellos.count - 1; i >= 0; --i) {
    if (i >= m->hellos.count) continue; /* other attempts of a rank were removed with one */
    sluice_tcp_hello_t* h = &m->hellos.list[i];
    const sluice_tcp_phase_t before = h->phase;
    const int has_moved = m->polls[m->num_listeners + i].revents != 0;
    int now = has_moved ? sluice_tcp_hello_advance(&m->group, h) : SLUICE_TCP_GOES_ON;
    if (now == SLUICE_TCP_GOES_ON && h->phase == SLUICE_TCP_AWAITS_WELCOME) {
      if (before != h->phase) settle_on(m, h->peer, h->fd);
      continue; /* until the deadline, or its end: the other rank may have kept it */
    }
    if (now == SLUICE_TCP_GOES_ON && now_ns >= h->until_ns) now = -ETIMEDOUT;
    if (now == SLUICE_TCP_GOES_ON) continue;
    const sluice_tcp_hello_t was = *h;
    (void)sluice_tcp_hellos_remove(&m->hellos, i);
    if (now == SLUICE_TCP_IS_DONE) {
      if (was.attempt >= 0) settle_on(m, was.peer, was.fd);
      keep(m, was.peer, was.fd);
    } else {
      note_failure(m, &was, now, now_ns);
      sluice_tcp_close(was.fd);
    }
  }
}

/* Accepts waiting connections. Returns -errno of an error after which none can be accepted. */
static int accept_from(sluice_tcp_mesh_t* m, int listener) {
  const uint64_t now_ns = sluice_now_ns();
  for (int i = 0; i < MAX_ACCEPTED_AT_ONCE; ++i) {
    sluice_tcp_hello_t hello;
    if (m->hellos.num_accepted >= most_accepted(m->group.rank, m->group.world_size))
      (void)sluice_tcp_hellos_turn_out_oldest(&m->hellos, 0, now_ns);
    const int fd = sluice_tcp_accept(listener);
    if (fd >= 0) {
      sluice_tcp_hello_accept(fd, &hello);
      sluice_tcp_hellos_add(&m->hellos, &hello, now_ns, HELLO_NS);
      continue;
    }
    if (!is_shortage(errno)) return 0; /* none is left, or the peer has closed it */
    m->shortage = errno;
    if (m->hellos.num_accepted == 0) return -errno;
    if (sluice_tcp_hellos_turn_out_oldest(&m->hellos, OLD_NS, now_ns)) continue;
    m->accept_ns = now_ns + PAUSE_NS; /* ranks among the present connections need less than that */
    return 0;
  }
  return 0;
}

/* Waits until a descriptor is ready, or something is due. Returns how many of the first polls are listeners. */
static int32_t poll_all(sluice_tcp_mesh_t* m, uint64_t due_ns) {
  const uint64_t now_ns = sluice_now_ns();
  int32_t num_listeners = 0, num = 0;
  if (now_ns >= m->accept_ns) {
    for (; num_listeners < m->listeners->count; ++num_listeners) {
      m->polls[num++] = (struct pollfd){.fd = m->listeners->fds[num_listeners], .events = POLLIN};
    }
  } else {
    due_ns = sluice_min_u64(due_ns, m->accept_ns);
  }
  for (int32_t i = 0; i < m->hellos.count; ++i) {
    const sluice_tcp_hello_t* h = &m->hellos.list[i];
    m->polls[num++] = (struct pollfd){.fd = h->fd, .events = sluice_tcp_hello_events(h)};
    if (h->phase != SLUICE_TCP_AWAITS_WELCOME) due_ns = sluice_min_u64(due_ns, h->until_ns);
  }
  m->num_listeners = num_listeners;
  const uint64_t left_ms = due_ns > now_ns ? (due_ns - now_ns + MS_NS - 1) / MS_NS : 0;
  if (poll(m->polls, (nfds_t)num, left_ms > 1000 ? 1000 : (int)left_ms) > 0) return num_listeners;
  for (int32_t i = 0; i < num; ++i) m->polls[i].revents = 0;
  return 0; /* interrupted, or due */
}

/* ---- why it failed ----------------------------------------------------------------------------------------------- */

static const char* reason_of(int what) {
  return what == 0                        ? "says nothing"
         : what == SLUICE_TCP_IS_STRANGER ? "the process that answers is not that rank"
                                          : strerror(-what);
}

static sluice_status_t fail_unreached(const sluice_tcp_mesh_t* m, int32_t peer) {
  char tried[384] = "";
  int native = ETIMEDOUT;
  for (int32_t attempt = 0; attempt < MAX_ATTEMPTS; ++attempt) {
    struct sockaddr_storage target;
    char host[64] = "?", port[8] = "?";
    const socklen_t length = target_of(m, peer, attempt, &target);
    if (length == 0) break;
    const int what = m->routes[peer].errors[attempt];
    if (what < 0 && what != SLUICE_TCP_IS_STRANGER) native = -what;
    (void)getnameinfo((struct sockaddr*)&target, length, host, sizeof host, port, sizeof port,
                      NI_NUMERICHOST | NI_NUMERICSERV);
    const size_t used = strlen(tried);
    snprintf(tried + used, sizeof tried - used, "%s%s port %s (%s)", used > 0 ? ", " : "", host, port, reason_of(what));
  }
  return sluice_error_record(SLUICE_E_EXTERNAL, m->group.rank, peer, native,
                             "tcp communicator: rank %d cannot connect to rank %d at %s. Let these machines reach each "
                             "other there, or name the interfaces to use",
                             m->group.rank, peer, tried[0] != '\0' ? tried : "any address");
}

static sluice_status_t fail_short(const sluice_tcp_mesh_t* m, int error) {
  return sluice_error_record(SLUICE_E_EXTERNAL, m->group.rank, -1, error,
                             "tcp communicator: rank %d has no descriptor left for its %d connections: %s. Allow more "
                             "(ulimit -n)",
                             m->group.rank, m->group.world_size - 1, strerror(error));
}

static sluice_status_t fail_late(const sluice_tcp_mesh_t* m) {
  int32_t peer = 0;
  while (peer == m->group.rank || m->connections[peer].socket >= 0) ++peer;
  if (m->shortage != 0) return fail_short(m, m->shortage);
  if (peer < m->group.rank) return fail_unreached(m, peer);
  return SLUICE_FAIL_PEER(SLUICE_E_EXTERNAL, m->group.rank, peer,
                          "tcp communicator: rank %d did not connect to rank %d in time", peer, m->group.rank);
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

static sluice_status_t meet(sluice_tcp_mesh_t* m) {
  while (m->missing > 0) {
    const uint64_t now_ns = sluice_now_ns();
    uint64_t due_ns = m->deadline_ns;
    if (now_ns >= m->deadline_ns) return fail_late(m);
    for (int32_t peer = 0; peer < m->group.rank; ++peer) {
      if (m->routes[peer].is_found) continue;
      const int error = now_ns >= m->routes[peer].next_ns ? try_next(m, peer, now_ns) : 0;
      if (error < 0) return fail_short(m, -error);
      due_ns = sluice_min_u64(due_ns, m->routes[peer].next_ns);
    }
    const int32_t num_listeners = poll_all(m, due_ns);
    advance_all(m);
    for (int32_t i = 0; i < num_listeners; ++i) {
      const int error = m->polls[i].revents != 0 ? accept_from(m, m->polls[i].fd) : 0;
      if (error < 0) return fail_short(m, -error);
    }
  }
  return SLUICE_OK;
}

sluice_status_t sluice_tcp_mesh_connect(sluice_tcp_mesh_t* meeting, const sluice_tcp_card_t* cards,
                                        const sluice_tcp_listeners_t* listeners, uint64_t deadline_ns,
                                        sluice_tcp_connection_t* connections) {
  meeting->group.cards = cards;
  meeting->listeners = listeners;
  meeting->deadline_ns = deadline_ns;
  meeting->connections = connections;
  meeting->missing = meeting->group.world_size - 1;
  const sluice_status_t status = meet(meeting);
  sluice_tcp_hellos_close(&meeting->hellos);
  return status;
}
