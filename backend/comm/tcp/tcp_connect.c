#include "backend/comm/tcp/tcp_connect.h"

#include <netinet/tcp.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/comm/exchange_arrays.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_meet.h"

typedef struct connecting_s {
  sluice_comm_t* parent;
  sluice_tcp_card_t* cards;        /* [W] */
  sluice_exchange_arrays_t arrays; /* of the exchange of cards; `send` is the beginning of the block */
  uint64_t bytes;                  /* of the block */
  sluice_tcp_listeners_t listeners;
  sluice_tcp_meeting_t* meeting;
} connecting_t;

/* ---- before anybody waits for this rank -------------------------------------------------------------------------- */

/* All that connecting needs. What fails later than this would leave the others waiting. */
static sluice_status_t prepare(connecting_t* c, const char* interfaces) {
  const int is_named = interfaces != NULL && interfaces[0] != '\0';
  const int32_t w = c->parent->world_size;
  /* Pointers stand first: each part is aligned as the next one needs it. */
  const uint64_t arrays = sluice_exchange_arrays_bytes(w), bytes = arrays + (uint64_t)w * sizeof(sluice_tcp_card_t);
  char* block = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "addresses of ranks");
  if (block == NULL) return sluice_alloc_status();
  c->bytes = bytes;
  c->arrays = sluice_exchange_arrays_in(block, w);
  c->cards = (sluice_tcp_card_t*)(void*)(block + arrays);
  SLUICE_TRY(sluice_tcp_meeting_create(c->parent->rank, c->parent->world_size, &c->meeting));
  sluice_tcp_card_t* mine = &c->cards[c->parent->rank];
  SLUICE_TRY(sluice_tcp_card_init(is_named ? interfaces : NULL, mine));
  return sluice_tcp_listen(c->parent->rank, is_named, mine, &c->listeners);
}

static void release(connecting_t* c) {
  sluice_tcp_listeners_close(&c->listeners);
  sluice_tcp_meeting_destroy(c->meeting);
  sluice_free(sluice_process_allocator(), c->arrays.send, c->bytes);
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

/* Every rank's card to every rank, through the parent. */
static sluice_status_t swap_cards(connecting_t* c) {
  for (int32_t r = 0; r < c->parent->world_size; ++r) {
    c->arrays.send[r] = &c->cards[c->parent->rank];
    c->arrays.recv[r] = &c->cards[r];
    c->arrays.send_bytes[r] = c->arrays.recv_bytes[r] = r == c->parent->rank ? 0 : sizeof *c->cards;
  }
  const sluice_exchange_t exchange = sluice_exchange_of(&c->arrays);
  return sluice_comm_exchange(c->parent, &exchange, "the addresses of all ranks");
}

/* One outcome for all: the highest rank that failed, 0 if none, else its rank + 1. */
static sluice_status_t agree(connecting_t* c, sluice_status_t mine, const char* what) {
  int64_t failed = mine != SLUICE_OK ? c->parent->rank + 1 : 0;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  SLUICE_TRY(
      sluice_comm_all_reduce_i64(c->parent, &failed, 1, SLUICE_REDUCE_MAX, "connections of the tcp communicator"));
  if (mine != SLUICE_OK) {
    (void)sluice_error_adopt(&why);
    return mine;
  }
  if (failed == 0) return SLUICE_OK;
  return SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, c->parent->rank, (int32_t)failed - 1,
                          "tcp communicator: rank %d %s; its own error says why", (int32_t)failed - 1, what);
}

static sluice_status_t connect_all(connecting_t* c, uint64_t deadline_ns, int* sockets) {
  SLUICE_TRY(sluice_tcp_meet(c->meeting, c->cards, &c->listeners, deadline_ns, sockets));
  for (int32_t peer = 0; peer < c->parent->world_size; ++peer) {
    const int on = 1;
    if (peer != c->parent->rank) (void)setsockopt(sockets[peer], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_config_t* config, sluice_status_t mine,
                                   int* out_sockets) {
  connecting_t c = {.parent = parent};
  for (int32_t r = 0; r < parent->world_size; ++r) out_sockets[r] = -1;
  if (mine == SLUICE_OK) mine = prepare(&c, config->interfaces);
  sluice_status_t status = agree(&c, mine, "is not ready to connect");
  if (status == SLUICE_OK) status = swap_cards(&c);
  if (status == SLUICE_OK) {
    const uint64_t deadline_ns = sluice_now_ns() + config->connect_timeout_ns;
    status = agree(&c, connect_all(&c, deadline_ns, out_sockets), "could not connect to all others");
  }
  release(&c);
  if (status == SLUICE_OK) return SLUICE_OK;
  for (int32_t r = 0; r < parent->world_size; ++r) {
    sluice_tcp_close(out_sockets[r]);
    out_sockets[r] = -1;
  }
  return status;
}
