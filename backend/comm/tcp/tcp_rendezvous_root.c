// SPDX-License-Identifier: Apache-2.0
/* Rank 0: one thread polls all callers. A caller that cannot prove the secret delays no other, and is remembered: if a
 * rank is then missing, the error says so. If one rank does not fit, all ranks are refused, including those that come
 * later, until all know it or the time is over. */
#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "backend/base/alloc.h"
#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_listen.h"
#include "backend/comm/tcp/tcp_hello.h"
#include "backend/comm/tcp/tcp_rendezvous.h"

/* The time that a caller has for the hello and its join message. */
#define HELLO_NS UINT64_C(3000000000)

enum { MAX_STRANGERS = 256, ADDRESS_TEXT = 80 };

typedef struct gathering_s {
  sluice_tcp_rendezvous_t* m;
  sluice_tcp_group_t group;
  sluice_tcp_listeners_t listeners;
  int32_t num_members; /* connected ranks */
  int32_t num_told;    /* callers that know the refusal */
  int32_t told_missing;
  int32_t is_refused;
  sluice_meet_refused_t refused;
  int32_t other_secret; /* the rank claimed by a caller with another secret; -1: there was none */
  char other_address[ADDRESS_TEXT];
  int32_t capacity;
  uint64_t bytes;              /* of the block with the arrays */
  sluice_tcp_hellos_t callers; /* [capacity]; greeted: its join message is being read */
  struct pollfd* polls;        /* [SLUICE_TCP_MAX_ADDRESSES + capacity + W] */
} gathering_t;

static void name_peer(int fd, char out[ADDRESS_TEXT]) {
  struct sockaddr_storage peer;
  socklen_t length = sizeof peer;
  char host[64] = "?", port[8] = "?";
  if (getpeername(fd, (struct sockaddr*)&peer, &length) == 0) {
    (void)getnameinfo((struct sockaddr*)&peer, length, host, sizeof host, port, sizeof port,
                      NI_NUMERICHOST | NI_NUMERICSERV);
  }
  snprintf(out, ADDRESS_TEXT, "%s port %s", host, port);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

static void tell(gathering_t* g, int fd) {
  (void)sluice_meet_send_frame(fd, SLUICE_MEET_REFUSED, &g->refused, sizeof g->refused, sluice_now_ns());
  sluice_tcp_close(fd);
  ++g->num_told;
}

/* Makes this thread's last error the error of all ranks. */
static void refuse(gathering_t* g) {
  if (g->is_refused) return;
  g->is_refused = 1;
  sluice_meet_refusal(&g->refused);
  for (int32_t r = 1; r < g->m->base.world_size; ++r) {
    if (g->m->sockets[r] < 0) continue;
    tell(g, g->m->sockets[r]);
    g->m->sockets[r] = -1;
  }
  g->num_members = 0;
}

static sluice_meet_waits_t missing_of(const gathering_t* g) {
  sluice_meet_waits_t waits = {.missing = 1, .present = 1 + g->num_members};
  while (waits.missing < g->m->base.world_size - 1 && g->m->sockets[waits.missing] >= 0) ++waits.missing;
  return waits;
}

static void refuse_late(gathering_t* g) {
  const sluice_meet_waits_t waits = missing_of(g);
  char more[256] = "";
  if (g->other_secret >= 0) {
    snprintf(more, sizeof more, ". A process at %s that claims to be rank %d has another secret", g->other_address,
             g->other_secret);
  }
  (void)sluice_meet_fail_late(g->m, &waits, more);
  refuse(g);
}

/* ---- ranks that have proved the secret --------------------------------------------------------------------------- */

/* Returns OK if this rank may join. */
static sluice_status_t judge(const gathering_t* g, const sluice_tcp_hello_t* caller) {
  sluice_meet_join_t join;
  memcpy(&join, caller->in, sizeof join);
  const int32_t rank = caller->peer, w = g->m->base.world_size;
  char here[ADDRESS_TEXT], there[ADDRESS_TEXT] = "this process";
  name_peer(caller->fd, here);
  if (join.version != SLUICE_MEET_VERSION || join.card_bytes != sizeof(sluice_tcp_card_t)) {
    return SLUICE_FAIL_PEER(
        SLUICE_E_MISMATCH, 0, rank,
        "tcp communicator: rank %d at %s has another build of Sluice than rank 0: install one build "
        "on all ranks",
        rank, here);
  }
  if (join.world_size != w || rank >= w) {
    return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, 0, rank,
                            "tcp communicator: rank %d at %s was started with world_size %d and rank 0 with world_size "
                            "%d: start all ranks with one world_size",
                            rank, here, join.world_size, w);
  }
  if (rank > 0 && g->m->sockets[rank] < 0) return SLUICE_OK;
  if (rank > 0) name_peer(g->m->sockets[rank], there);
  return SLUICE_FAIL_PEER(
      SLUICE_E_MISMATCH, 0, rank,
      "tcp communicator: two processes claim to be rank %d, at %s and at %s: give each process its own rank", rank,
      there, here);
}

/* Members send nothing before all ranks are there, so a readable socket has ended. */
static void drop_if_left(gathering_t* g, int32_t rank) {
  char unused;
  const int fd = g->m->sockets[rank];
  const ssize_t n = recv(fd, &unused, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  sluice_tcp_close(fd);
  g->m->sockets[rank] = -1;
  --g->num_members;
}

static void join(gathering_t* g, const sluice_tcp_hello_t* caller) {
  const int32_t rank = caller->peer, is_member = rank > 0 && rank < g->m->base.world_size;
  if (is_member && g->m->sockets[rank] >= 0) drop_if_left(g, rank); /* a rank that was restarted */
  if (!g->is_refused && judge(g, caller) != SLUICE_OK) refuse(g);
  if (g->is_refused) {
    tell(g, caller->fd);
    return;
  }
  sluice_meet_hurry(caller->fd);
  g->m->sockets[rank] = caller->fd;
  ++g->num_members;
  g->told_missing = -1;
}

/* If this rank ends, waiting ranks can then name the missing rank themselves. */
static void tell_whom_we_wait_for(gathering_t* g) {
  const sluice_meet_waits_t waits = missing_of(g);
  if (g->is_refused || waits.missing == g->told_missing) return;
  g->told_missing = waits.missing;
  for (int32_t r = 1; r < g->m->base.world_size; ++r) {
    if (g->m->sockets[r] < 0) continue;
    (void)sluice_meet_send_frame(g->m->sockets[r], SLUICE_MEET_WAITS, &waits, sizeof waits, sluice_now_ns());
  }
}

/* ---- callers ----------------------------------------------------------------------------------------------------- */

static void accept_callers(gathering_t* g, int listener) {
  for (int i = 0; i < MAX_STRANGERS; ++i) {
    const uint64_t now_ns = sluice_now_ns();
    if (g->callers.count == g->capacity) (void)sluice_tcp_hellos_turn_out_oldest(&g->callers, 0, now_ns);
    const int fd = sluice_tcp_accept(listener);
    if (fd < 0) {
      const struct timespec pause = {.tv_nsec = 20000000};
      if (errno != EMFILE && errno != ENFILE) return;
      (void)sluice_tcp_hellos_turn_out_oldest(&g->callers, 0, now_ns);
      nanosleep(&pause, NULL); /* no descriptor is left: callers that have one need little time */
      return;
    }
    sluice_tcp_hello_t hello;
    sluice_tcp_hello_accept(fd, &hello);
    sluice_tcp_hellos_add(&g->callers, &hello, now_ns, HELLO_NS);
  }
}

static int read_join(sluice_tcp_hello_t* caller) { return sluice_tcp_hello_hear(caller, sizeof(sluice_meet_join_t)); }

static int advance(gathering_t* g, sluice_tcp_hello_t* caller) {
  if (caller->phase == SLUICE_TCP_GREETED) return read_join(caller);
  const int now = sluice_tcp_hello_advance(&g->group, caller);
  /* It used the right protocol, and left after it had seen this rank's proof, or sent a wrong proof itself. */
  if (now < 0 && caller->phase == SLUICE_TCP_AWAITS_PROOF) {
    g->other_secret = caller->peer;
    name_peer(caller->fd, g->other_address);
  }
  return now == SLUICE_TCP_IS_DONE ? read_join(caller) : now;
}

static void advance_all(gathering_t* g, const struct pollfd* polls) {
  const uint64_t now_ns = sluice_now_ns();
  for (int32_t i = g->callers.count - 1; i >= 0; --i) {
    int now = polls[i].revents != 0 ? advance(g, &g->callers.list[i]) : SLUICE_TCP_GOES_ON;
    if (now == SLUICE_TCP_GOES_ON && now_ns >= g->callers.list[i].until_ns) now = -ETIMEDOUT;
    if (now == SLUICE_TCP_GOES_ON) continue;
    const sluice_tcp_hello_t caller = g->callers.list[i];
    (void)sluice_tcp_hellos_remove(&g->callers, i);
    if (now == SLUICE_TCP_IS_DONE) {
      join(g, &caller);
    } else {
      sluice_tcp_close(caller.fd);
    }
  }
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

static void turn(gathering_t* g) {
  const int32_t w = g->m->base.world_size;
  int32_t num = 0;
  for (int32_t i = 0; i < g->listeners.count; ++i) {
    g->polls[num++] = (struct pollfd){.fd = g->listeners.fds[i], .events = POLLIN};
  }
  for (int32_t i = 0; i < g->callers.count; ++i) {
    g->polls[num++] = (struct pollfd){.fd = g->callers.list[i].fd, .events = POLLIN};
  }
  const struct pollfd* members = &g->polls[num];
  for (int32_t r = 1; r < w; ++r) g->polls[num++] = (struct pollfd){.fd = g->m->sockets[r], .events = POLLIN};
  const uint64_t now_ns = sluice_now_ns();
  const uint64_t left_ms = g->m->deadline_ns > now_ns ? (g->m->deadline_ns - now_ns + 999999) / 1000000 : 0;
  if (poll(g->polls, (nfds_t)num, (int)sluice_min_u64(left_ms, 200)) < 0) return;
  for (int32_t r = 1; r < w; ++r) {
    if (members[r - 1].revents != 0 && g->m->sockets[r] >= 0) drop_if_left(g, r);
  }
  advance_all(g, g->polls + g->listeners.count);
  for (int32_t i = 0; i < g->listeners.count; ++i) {
    if (g->polls[i].revents != 0) accept_callers(g, g->listeners.fds[i]);
  }
}

static sluice_status_t gather(gathering_t* g) {
  const int32_t others = g->m->base.world_size - 1;
  while (!g->is_refused ? g->num_members < others : g->num_told < others) {
    if (sluice_now_ns() >= g->m->deadline_ns) {
      if (!g->is_refused) refuse_late(g);
      break;
    }
    tell_whom_we_wait_for(g);
    turn(g);
  }
  if (g->is_refused) return sluice_meet_adopt(g->m, &g->refused);
  for (int32_t r = 1; r <= others; ++r) {
    (void)sluice_meet_send_frame(g->m->sockets[r], SLUICE_MEET_BEGINS, NULL, 0, sluice_now_ns());
  }
  return SLUICE_OK;
}

sluice_status_t sluice_tcp_rendezvous_gather(sluice_tcp_rendezvous_t* m) {
  gathering_t g = {.m = m, .other_secret = -1, .told_missing = -1};
  g.group = (sluice_tcp_group_t){.rank = SLUICE_TCP_MEETING_POINT, .world_size = INT32_MAX, .key = m->key};
  g.capacity = MAX_STRANGERS + 2 * m->base.world_size;
  const uint64_t num_polls = SLUICE_TCP_MAX_ADDRESSES + (uint64_t)g.capacity + (uint64_t)m->base.world_size;
  g.bytes = (uint64_t)g.capacity * sizeof(sluice_tcp_hello_t) + num_polls * sizeof(struct pollfd);
  g.callers.list = sluice_alloc(sluice_process_allocator(), g.bytes, "callers of the tcp communicator");
  if (g.callers.list == NULL) return sluice_alloc_status();
  g.polls = (struct pollfd*)(void*)(g.callers.list + g.capacity);
  sluice_status_t status = sluice_tcp_listen_at(0, m->root, &g.listeners);
  if (status == SLUICE_OK) status = gather(&g);
  sluice_tcp_hellos_close(&g.callers);
  sluice_tcp_listeners_close(&g.listeners);
  sluice_free(sluice_process_allocator(), g.callers.list, g.bytes);
  return status;
}
