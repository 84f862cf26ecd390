// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_connect.h"

#include <netinet/tcp.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_mac.h"

typedef struct connecting_s {
  sluice_tcp_parent_t* parent;
  const sluice_tcp_way_t* way;
  sluice_tcp_card_t* cards; /* [W] */
  sluice_tcp_listeners_t listeners;
  sluice_tcp_mesh_t* meeting;
} connecting_t;

static const sluice_tcp_endpoint_t* endpoint_of(const connecting_t* c, int32_t rank) {
  const sluice_tcp_endpoint_t* endpoints = c->way->endpoints;
  return endpoints != NULL && endpoints[rank].port != 0 ? &endpoints[rank] : NULL;
}

/* ---- before other ranks wait for this one ------------------------------------------------------------------------ */

/* Acquires everything that connecting needs. A later failure would leave the other ranks waiting. */
static sluice_status_t prepare(connecting_t* c) {
  const char* interfaces = c->way->interfaces;
  const int is_named = interfaces != NULL && interfaces[0] != '\0';
  const int32_t rank = c->parent->rank, w = c->parent->world_size;
  c->cards = sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)w * sizeof *c->cards, "addresses of ranks");
  if (c->cards == NULL) return sluice_alloc_status();
  SLUICE_TRY(sluice_tcp_mesh_create(rank, w, &c->meeting));
  sluice_tcp_card_t* mine = &c->cards[rank];
  SLUICE_TRY(sluice_tcp_card_init(is_named ? interfaces : NULL, mine));
  const sluice_tcp_endpoint_t* endpoint = endpoint_of(c, rank);
  if (endpoint != NULL) return sluice_tcp_listen_at(rank, endpoint, &c->listeners);
  return sluice_tcp_listen(rank, is_named, mine, &c->listeners);
}

static void release(connecting_t* c) {
  sluice_tcp_listeners_close(&c->listeners);
  sluice_tcp_mesh_destroy(c->meeting);
  sluice_free(sluice_process_allocator(), c->cards, (uint64_t)c->parent->world_size * sizeof *c->cards);
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

/* Agrees on one outcome for all ranks: the maximum of (failed rank + 1), 0 if none failed. */
static sluice_status_t agree(connecting_t* c, sluice_status_t mine, const char* what) {
  int64_t failed = mine != SLUICE_OK ? c->parent->rank + 1 : 0;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  SLUICE_TRY(c->parent->max(c->parent, &failed, "connections of the tcp communicator"));
  if (mine != SLUICE_OK) {
    (void)sluice_error_adopt(&why);
    return mine;
  }
  if (failed == 0) return SLUICE_OK;
  return SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, c->parent->rank, (int32_t)failed - 1,
                          "tcp communicator: rank %d %s; its own error says why", (int32_t)failed - 1, what);
}

/* An endpoint from the caller takes precedence over the addresses that the rank found itself. */
static void use_endpoint(const sluice_tcp_endpoint_t* endpoint, sluice_tcp_card_t* card) {
  if (endpoint == NULL) return;
  card->any_port = 0;
  card->num_addresses = endpoint->num_addresses;
  memcpy(card->addresses, endpoint->addresses, sizeof card->addresses);
}

static void derive_secret(const uint8_t* key, int32_t rank, sluice_tcp_card_t* card) {
  struct {
    uint8_t number[SLUICE_TCP_MAC_BYTES];
    int64_t rank;
  } of = {.rank = rank};
  if (key == NULL) return;
  memcpy(of.number, card->secret, sizeof of.number);
  sluice_tcp_mac(key, &of, sizeof of, card->secret);
}

static sluice_status_t swap_cards(connecting_t* c) {
  SLUICE_TRY(c->parent->swap(c->parent, c->cards, sizeof *c->cards, "the addresses of all ranks"));
  for (int32_t r = 0; r < c->parent->world_size; ++r) {
    use_endpoint(endpoint_of(c, r), &c->cards[r]);
    derive_secret(c->way->key, r, &c->cards[r]);
  }
  return SLUICE_OK;
}

static sluice_status_t connect_all(connecting_t* c, uint64_t deadline_ns, sluice_tcp_connection_t* connections) {
  SLUICE_TRY(sluice_tcp_mesh_connect(c->meeting, c->cards, &c->listeners, deadline_ns, connections));
  for (int32_t peer = 0; peer < c->parent->world_size; ++peer) {
    const int on = 1, fd = connections[peer].socket;
    if (peer != c->parent->rank) (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_tcp_connect_over(sluice_tcp_parent_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                        sluice_tcp_connection_t* connections) {
  connecting_t c = {.parent = parent, .way = way};
  if (mine == SLUICE_OK) mine = prepare(&c);
  sluice_status_t status = agree(&c, mine, "is not ready to connect");
  if (status == SLUICE_OK) status = swap_cards(&c);
  if (status == SLUICE_OK) {
    const uint64_t deadline_ns = sluice_now_ns() + way->connect_timeout_ns;
    status = agree(&c, connect_all(&c, deadline_ns, connections), "could not connect to all others");
  }
  release(&c);
  if (status == SLUICE_OK) return SLUICE_OK;
  for (int32_t r = 0; r < parent->world_size; ++r) {
    sluice_tcp_close(connections[r].socket);
    connections[r].socket = -1;
  }
  return status;
}

/* ---- over a communicator ----------------------------------------------------------------------------------------- */

typedef struct comm_parent_s {
  sluice_tcp_parent_t base;
  sluice_comm_t* comm;
} comm_parent_t;

static sluice_status_t comm_swap(sluice_tcp_parent_t* parent, void* records, uint64_t record_bytes, const char* phase) {
  return sluice_comm_all_gather(((comm_parent_t*)parent)->comm, records, record_bytes, phase);
}

static sluice_status_t comm_max(sluice_tcp_parent_t* parent, int64_t* value, const char* phase) {
  return sluice_comm_all_reduce_i64(((comm_parent_t*)parent)->comm, value, 1, SLUICE_REDUCE_MAX, phase);
}

sluice_status_t sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                   sluice_tcp_connection_t* connections) {
  comm_parent_t p = {
      .base = {.rank = parent->rank, .world_size = parent->world_size, .swap = comm_swap, .max = comm_max},
      .comm = parent};
  return sluice_tcp_connect_over(&p.base, way, mine, connections);
}
