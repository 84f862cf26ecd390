// SPDX-License-Identifier: Apache-2.0
/* Ranks connected by TCP connections of Sluice's own, which are made through a communicator that the ranks already
 * share, or through the address of rank 0 and a secret (tcp_rendezvous.h).
 *
 * There is no thread of its own: a wait moves the bytes of both requests in flight, from and to the caller's buffers.
 * There is no second thread to wake, so on a core that is busy with GEMMs a small exchange costs one wake-up per
 * message, and a large one is copied by the thread that needs it. Next to GEMMs on one core, gloo's exchanges of few
 * rows took 1 to 3 ms and these 0.1 to 0.3 ms (docs/architecture.md).
 *
 * A rank that leaves with nothing outstanding says so (FRAME_BYE). A connection that ends without it means that the
 * peer died, failed or aborted. This ends every wait of this rank, even one for a third rank, which may be waiting for
 * the same lost rank. A rank that gives up for this reason names the lost rank (FRAME_LOST), if it can send a frame
 * between two others, so that its peers blame the lost rank and not the first one whose connection they find closed.
 * The connections of a machine without power or network do not end: tcp_keepalive.h detects that. */
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "backend/base/clock.h"
#include "backend/base/structs.h"
#include "backend/comm/comm.h"
#include "backend/comm/tcp/tcp_connect.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_frames.h"
#include "backend/comm/tcp/tcp_mac.h"
#include "backend/comm/tcp/tcp_messages.h"
#include "backend/comm/tcp/tcp_rendezvous.h"
#include "backend/comm/tcp/tcp_side_channel.h"

enum { MAX_EVENTS = 64 };

/* After a timeout, a request may still complete while the other ranks reach their own deadlines. Leaving at once would
 * tell them that this rank was lost, instead of which rank was silent. */
#define GRACE_NS UINT64_C(1000000000)

typedef struct tcp_comm_s {
  sluice_comm_t base;
  sluice_comm_vtable_t vtable; /* of this object: without the functions that the parent lacks */
  sluice_comm_t* parent;       /* NULL: there is none */
  sluice_tcp_way_t way;        /* for connections that are made later; it points to the next three members */
  char* interfaces;            /* NULL: the caller named none */
  uint8_t key[SLUICE_TCP_MAC_BYTES];
  sluice_tcp_endpoint_t* endpoints; /* [W]; NULL with a parent */
  uint64_t bytes;                   /* of this block */
  int epoll;
  int wake; /* eventfd with which abort ends a wait */
  uint32_t next_number;
  _Atomic int32_t is_aborted;
  sluice_tcp_frames_t frames;
} tcp_comm_t;

static tcp_comm_t* downcast(sluice_comm_t* comm) { return (tcp_comm_t*)comm; }

/* ---- exchanges --------------------------------------------------------------------------------------------------- */

static sluice_status_t tcp_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                 sluice_comm_request_t** out_request) {
  tcp_comm_t* comm = downcast(base);
  sluice_comm_request_t* request = SLUICE_FREE_REQUEST(comm->frames.requests);
  if (request == NULL) return sluice_comm_fail_third(base);
  request->is_used = 1;
  request->number = comm->next_number++;
  request->pending = 0;
  for (int32_t r = 0; r < base->world_size; ++r) {
    sluice_tcp_transfer_t* t = &request->transfers[r];
    memset(t, 0, sizeof *t);
    if (r == base->rank) continue;
    *t = (sluice_tcp_transfer_t){.send = exchange->send_bytes[r] > 0 ? exchange->send[r] : NULL,
                                 .recv = exchange->recv_bytes[r] > 0 ? exchange->recv[r] : NULL,
                                 .send_left = exchange->send_bytes[r],
                                 .recv_left = exchange->recv_bytes[r],
                                 .is_sending = exchange->send_bytes[r] > 0,
                                 .is_receiving = exchange->recv_bytes[r] > 0};
    request->pending += t->is_sending + t->is_receiving;
  }
  /* Begin with the next rank, so that not all ranks send to rank 0 first. */
  for (int32_t step = 1; step < base->world_size; ++step) {
    sluice_tcp_push(&comm->frames, (base->rank + step) % base->world_size);
  }
  *out_request = request;
  return SLUICE_OK;
}

/* Marks the connections with events; returns after an event, or at the deadline. */
static void await_events(tcp_comm_t* comm, uint64_t deadline_ns) {
  if (sluice_tcp_set_low_waters(&comm->frames)) return;
  struct epoll_event events[MAX_EVENTS];
  const uint64_t now_ns = sluice_now_ns();
  const uint64_t left_ms = deadline_ns > now_ns ? (deadline_ns - now_ns + 999999) / 1000000 : 0;
  const int n = epoll_wait(comm->epoll, events, MAX_EVENTS, left_ms > INT_MAX ? INT_MAX : (int)left_ms);
  /* On idle: comm_exchange.c divides waits into slices of a fifth of a second. */
  if (n <= 0) sluice_tcp_lose_silent(comm->frames.connections, comm->base.world_size);
  for (int i = 0; i < n; ++i) { /* with this rank's number if abort has woken it */
    sluice_tcp_note_events(&comm->frames.connections[events[i].data.u32], events[i].events);
  }
}

static int32_t find_peer(const tcp_comm_t* comm, const sluice_comm_request_t* request, int32_t state) {
  int32_t found = -1;
  for (int32_t r = 0; r < comm->base.world_size; ++r) {
    const sluice_tcp_transfer_t* t = &request->transfers[r];
    if (comm->frames.connections[r].state != state) continue;
    if (t->is_receiving) return r;
    if (t->is_sending && found < 0) found = r;
  }
  return found;
}

static sluice_status_t fail_lost(const tcp_comm_t* comm, int32_t peer) {
  const sluice_tcp_peer_t* p = &comm->frames.peers[peer];
  const sluice_tcp_connection_t* c = &comm->frames.connections[peer];
  if (c->state == SLUICE_TCP_LOST && c->native_error == EPROTO) {
    return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, comm->base.rank, peer,
                            "rank %d sends %llu bytes to rank %d (exchange %u), which expects %llu: the ranks disagree "
                            "on their counts; please report it",
                            peer, (unsigned long long)p->in.bytes, comm->base.rank, p->in.number,
                            (unsigned long long)p->expected);
  }
  if (c->state == SLUICE_TCP_LOST && sluice_tcp_is_network(c->native_error)) {
    return sluice_error_record(SLUICE_E_PEER_LOST, comm->base.rank, peer, c->native_error,
                               "rank %d lost rank %d, whose machine has not responded for %d s: it is down, or the "
                               "network between the two is. " SLUICE_COMM_BROKEN " (tcp: %s)",
                               comm->base.rank, peer, SLUICE_TCP_KEEPALIVE_S,
                               c->silence.is_silent ? "several probes without a response" : strerror(c->native_error));
  }
  const char* how = c->state == SLUICE_TCP_LEFT                              ? "it has left"
                    : c->state == SLUICE_TCP_LIVE && peer != comm->base.rank ? "another rank reported its loss"
                    : c->native_error == 0                                   ? "its connection was closed"
                                                                             : strerror(c->native_error);
  return sluice_error_record(SLUICE_E_PEER_LOST, comm->base.rank, peer, c->native_error,
                             "rank %d lost rank %d, which died or left: see its log. " SLUICE_COMM_BROKEN " (tcp: %s)",
                             comm->base.rank, peer, how);
}

/* Returns OK unless something ends the request. */
static sluice_status_t check(tcp_comm_t* comm, const sluice_comm_request_t* request) {
  if (atomic_load(&comm->is_aborted)) {
    return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->base.rank, -1, "rank %d: the tcp communicator was aborted",
                            comm->base.rank);
  }
  if (comm->frames.lost >= 0) {
    sluice_tcp_tell_of_loss(&comm->frames, comm->frames.lost);
    return fail_lost(comm, comm->frames.lost);
  }
  const int32_t left = find_peer(comm, request, SLUICE_TCP_LEFT);
  if (left < 0) return SLUICE_OK;
  sluice_tcp_tell_of_loss(&comm->frames, left);
  return fail_lost(comm, left);
}

static sluice_status_t tcp_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                int32_t* out_peer) {
  tcp_comm_t* comm = downcast(base);
  for (;;) {
    sluice_tcp_progress(&comm->frames);
    sluice_status_t status = request->pending == 0 ? SLUICE_OK : check(comm, request);
    if (status != SLUICE_OK || request->pending == 0) {
      request->is_used = 0;
      return status;
    }
    if (sluice_now_ns() >= deadline_ns) {
      if (out_peer != NULL) *out_peer = find_peer(comm, request, SLUICE_TCP_LIVE);
      return SLUICE_E_TIMED_OUT;
    }
    await_events(comm, deadline_ns);
  }
}

/* Buffers of a request are touched only during a wait, so the request can be released. */
static void tcp_abandon(sluice_comm_t* base, sluice_comm_request_t* request) {
  tcp_comm_t* comm = downcast(base);
  const int is_late = atomic_load(&base->broken) == SLUICE_E_TIMED_OUT;
  if (is_late && tcp_wait(base, request, sluice_now_ns() + GRACE_NS, NULL) != SLUICE_E_TIMED_OUT) return;
  request->is_used = 0;
  if (comm->frames.lost < 0) comm->frames.lost = base->rank; /* nothing can follow a half-sent frame */
}

static void tcp_abort(sluice_comm_t* base) {
  tcp_comm_t* comm = downcast(base);
  atomic_store(&comm->is_aborted, 1);
  sluice_tcp_wake(comm->wake);
  for (int32_t r = 0; r < base->world_size; ++r) {
    if (r != base->rank) (void)shutdown(comm->frames.connections[r].socket, SHUT_RDWR);
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

static void tcp_destroy(sluice_comm_t* base) {
  tcp_comm_t* comm = downcast(base);
  const int is_idle = SLUICE_REQUESTS_ARE_FREE(comm->frames.requests) && comm->frames.lost < 0;
  if (is_idle && atomic_load(&base->broken) == SLUICE_OK) sluice_tcp_leave(&comm->frames);
  if (comm->frames.has_told && !atomic_load(&comm->is_aborted)) {
    sluice_tcp_part(comm->frames.connections, base->world_size);
  }
  for (int32_t r = 0; r < base->world_size; ++r) sluice_tcp_close(comm->frames.connections[r].socket);
  sluice_tcp_close(comm->epoll);
  sluice_tcp_close(comm->wake);
  sluice_comm_release(comm->parent);
  sluice_free(sluice_process_allocator(), comm->endpoints, (uint64_t)base->world_size * sizeof *comm->endpoints);
  if (comm->interfaces != NULL) {
    sluice_free(sluice_process_allocator(), comm->interfaces, strlen(comm->interfaces) + 1);
  }
  sluice_free(sluice_process_allocator(), comm, comm->bytes);
}

/* Allocates the communicator and its arrays in one block. */
static tcp_comm_t* allocate(int32_t world_size) {
  const uint64_t w = (uint64_t)world_size;
  const uint64_t bytes = sizeof(tcp_comm_t) + w * (sizeof(sluice_tcp_peer_t) + sizeof(sluice_tcp_connection_t) +
                                                   SLUICE_MAX_IN_FLIGHT * sizeof(sluice_tcp_transfer_t));
  tcp_comm_t* comm = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "tcp communicator");
  if (comm == NULL) return NULL;
  comm->bytes = bytes;
  comm->epoll = comm->wake = -1;
  comm->frames.world_size = world_size;
  comm->frames.lost = -1;
  comm->frames.requests[0].transfers = (sluice_tcp_transfer_t*)(void*)(comm + 1);
  comm->frames.requests[1].transfers = comm->frames.requests[0].transfers + w;
  comm->frames.peers = (sluice_tcp_peer_t*)(void*)(comm->frames.requests[1].transfers + w);
  comm->frames.connections = (sluice_tcp_connection_t*)(void*)(comm->frames.peers + w);
  sluice_tcp_connections_init(comm->frames.connections, world_size);
  return comm;
}

static sluice_status_t prepare_events(tcp_comm_t* comm) {
  comm->epoll = sluice_tcp_open_epoll();
  comm->wake = sluice_tcp_open_eventfd();
  if (comm->epoll >= 0 && sluice_tcp_watch(comm->epoll, comm->wake, EPOLLIN, comm->base.rank)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "tcp communicator: rank %d cannot make an epoll: %s", comm->base.rank,
                     strerror(errno));
}

static sluice_status_t watch_peers(tcp_comm_t* comm) {
  const int32_t r = sluice_tcp_watch_all(comm->epoll, comm->frames.connections, comm->base.world_size);
  if (r == comm->base.world_size) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "tcp communicator: rank %d cannot watch its connection to rank %d: %s",
                     comm->base.rank, r, strerror(errno));
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
  if (out_config->connect_timeout_ns == 0) out_config->connect_timeout_ns = SLUICE_TCP_CONNECT_NS;
  return SLUICE_OK;
}

/* Copies the strings: the caller's may be gone when messages are opened. */
static sluice_status_t keep_config(tcp_comm_t* comm, const sluice_tcp_config_t* config) {
  comm->way.connect_timeout_ns = config->connect_timeout_ns;
  if (config->interfaces == NULL) return SLUICE_OK;
  const uint64_t bytes = strlen(config->interfaces) + 1;
  comm->interfaces = sluice_alloc(sluice_process_allocator(), bytes, "names of interfaces");
  if (comm->interfaces == NULL) return sluice_alloc_status();
  memcpy(comm->interfaces, config->interfaces, bytes);
  comm->way.interfaces = comm->interfaces;
  return SLUICE_OK;
}

static sluice_status_t tcp_messages_open(sluice_comm_t* base, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  return sluice_tcp_messages_open(base, &downcast(base)->way, messages, out_wire);
}

/* parent NULL: there is none. A failure on this rank alone is told to the other ranks when they connect. */
static sluice_status_t prepare(tcp_comm_t* comm, sluice_comm_t* parent, const sluice_comm_config_t* base,
                               const sluice_tcp_config_t* config) {
  const sluice_comm_vtable_t nothing = {.destroy = NULL}, *of = parent != NULL ? parent->vtable : &nothing;
  comm->vtable = (sluice_comm_vtable_t){
      .destroy = tcp_destroy,
      .exchange_start = tcp_start,
      .exchange_wait = tcp_wait,
      .abort = tcp_abort,
      .is_interrupted = of->is_interrupted != NULL ? tcp_is_interrupted : NULL,
      .abandon = tcp_abandon,
      .messages_open = tcp_messages_open,
      .publish = of->publish != NULL ? tcp_publish : NULL,
      .lookup = of->lookup != NULL ? tcp_lookup : NULL,
  };
  sluice_comm_init_base(&comm->base, &comm->vtable, "tcp", base);
  if (parent != NULL) sluice_comm_retain(parent);
  comm->parent = parent;
  comm->frames.rank = base->rank;
  sluice_tcp_config_t c;
  SLUICE_TRY(read_config(config, &c));
  SLUICE_TRY(keep_config(comm, &c));
  return prepare_events(comm);
}

static sluice_status_t finish(tcp_comm_t* comm, sluice_status_t status, sluice_comm_t** out_comm) {
  if (status == SLUICE_OK) {
    *out_comm = &comm->base;
    return SLUICE_OK;
  }
  atomic_store(&comm->base.broken, status); /* no farewell */
  tcp_destroy(&comm->base);
  return status;
}

/* kept: the parent, or NULL. */
static sluice_status_t create_over(sluice_comm_t* parent, sluice_comm_t* kept, const sluice_tcp_config_t* config,
                                   sluice_comm_t** out_comm) {
  tcp_comm_t* comm = allocate(parent->world_size);
  if (comm == NULL) {
    const sluice_status_t status = sluice_alloc_status();
    sluice_comm_abort(parent); /* the other ranks would wait for this rank's address */
    return status;
  }
  const sluice_comm_config_t base = {.rank = parent->rank,
                                     .world_size = parent->world_size,
                                     .timeout_ns = parent->timeout_ns,
                                     .warn_ns = parent->warn_ns};
  sluice_status_t status = prepare(comm, kept, &base, config);
  status = sluice_tcp_connect(parent, &comm->way, status, comm->frames.connections);
  if (status == SLUICE_OK) {
    status = watch_peers(comm);
    if (status != SLUICE_OK) sluice_comm_abort(parent); /* the other ranks have agreed that all connections exist */
  }
  return finish(comm, status, out_comm);
}

sluice_status_t sluice_comm_create_tcp(sluice_comm_t* parent, const sluice_tcp_config_t* config,
                                       sluice_comm_t** out_comm) {
  if (out_comm == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_tcp: out_comm is NULL");
  *out_comm = NULL;
  if (parent == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_tcp: parent is NULL");
  return create_over(parent, parent, config, out_comm);
}

sluice_status_t sluice_tcp_open_headers(sluice_comm_t* comm, sluice_comm_t** out_tcp) {
  *out_tcp = NULL;
  return create_over(comm, NULL, NULL, out_tcp);
}

sluice_status_t sluice_tcp_open_side_channel(sluice_comm_t* comm, sluice_messages_t* messages,
                                             sluice_wire_t** out_wire) {
  const sluice_tcp_way_t way = {.connect_timeout_ns = SLUICE_TCP_CONNECT_NS};
  return sluice_tcp_messages_open(comm, &way, messages, out_wire);
}

/* ---- without a parent -------------------------------------------------------------------------------------------- */

static sluice_status_t check_at(const char* addresses, const void* secret, uint64_t secret_bytes, int32_t rank) {
  if (addresses == NULL || addresses[0] == '\0') {
    return SLUICE_FAIL_PEER(SLUICE_E_INVALID_ARGUMENT, rank, -1,
                            "sluice_comm_create_tcp_at: addresses is %s; give the \"host:port\" of rank 0",
                            addresses == NULL ? "NULL" : "empty");
  }
  if (secret == NULL || secret_bytes < SLUICE_TCP_LEAST_SECRET) {
    return SLUICE_FAIL_PEER(SLUICE_E_INVALID_ARGUMENT, rank, -1,
                            "sluice_comm_create_tcp_at: secret has %llu bytes; it needs at least %d that nobody can "
                            "guess, the same on all ranks (openssl rand -hex 16)",
                            secret == NULL ? 0ULL : (unsigned long long)secret_bytes, SLUICE_TCP_LEAST_SECRET);
  }
  return SLUICE_OK;
}

/* A list that says where every rank listens excludes `interfaces`. */
static sluice_status_t read_endpoints(tcp_comm_t* comm, const char* addresses) {
  const int32_t w = comm->base.world_size;
  comm->endpoints =
      sluice_alloc(sluice_process_allocator(), (uint64_t)w * sizeof *comm->endpoints, "addresses of ranks");
  if (comm->endpoints == NULL) return sluice_alloc_status();
  SLUICE_TRY(sluice_tcp_endpoints_read(addresses, comm->base.rank, w, sluice_now_ns() + comm->way.connect_timeout_ns,
                                       comm->endpoints));
  if (w > 1 && comm->endpoints[w - 1].port != 0 && comm->interfaces != NULL) {
    return SLUICE_FAIL_PEER(SLUICE_E_INVALID_ARGUMENT, comm->base.rank, -1,
                            "sluice_comm_create_tcp_at: addresses says where each rank listens, and "
                            "sluice_tcp_config_t.interfaces too: give one of them");
  }
  comm->way.key = comm->key;
  comm->way.endpoints = comm->endpoints;
  return SLUICE_OK;
}

static sluice_status_t connect_at(tcp_comm_t* comm) {
  sluice_tcp_rendezvous_t* rendezvous;
  if (comm->base.world_size == 1) return SLUICE_OK;
  SLUICE_TRY(sluice_tcp_rendezvous_open(comm->base.rank, comm->base.world_size, &comm->endpoints[0], comm->key,
                                        comm->way.connect_timeout_ns, &rendezvous));
  sluice_tcp_parent_t* parent = sluice_tcp_rendezvous_parent(rendezvous);
  const sluice_status_t status = sluice_tcp_connect_over(parent, &comm->way, SLUICE_OK, comm->frames.connections);
  sluice_tcp_rendezvous_close(rendezvous);
  return status;
}

sluice_status_t sluice_comm_create_tcp_at(const sluice_comm_config_t* config, const char* addresses, const void* secret,
                                          uint64_t secret_bytes, const sluice_tcp_config_t* tcp,
                                          sluice_comm_t** out_comm) {
  if (out_comm == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_tcp_at: out_comm is NULL");
  *out_comm = NULL;
  sluice_comm_config_t base;
  SLUICE_TRY(sluice_comm_config_read(config, &base));
  SLUICE_TRY(check_at(addresses, secret, secret_bytes, base.rank));
  tcp_comm_t* comm = allocate(base.world_size);
  if (comm == NULL) return sluice_alloc_status();
  sluice_tcp_key(secret, secret_bytes, comm->key);
  sluice_status_t status = prepare(comm, NULL, &base, tcp);
  if (status == SLUICE_OK) status = read_endpoints(comm, addresses);
  if (status == SLUICE_OK) status = connect_at(comm);
  if (status == SLUICE_OK) status = watch_peers(comm);
  return finish(comm, status, out_comm);
}

void sluice_tcp_config_init(sluice_tcp_config_t* out_config, size_t struct_size) {
  sluice_struct_init(out_config, struct_size, NULL, 0);
}
