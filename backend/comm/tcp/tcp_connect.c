#include "backend/comm/tcp/tcp_connect.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/tcp/tcp_address.h"
#include "backend/comm/tcp/tcp_descriptors.h"

/* How long one of several addresses may take to answer. Wrong ones mostly refuse at once. */
#define ATTEMPT_NS UINT64_C(3000000000)

/* The first bytes on a connection, in both directions: who is here, and whom it means. */
typedef struct hello_s {
  char magic[8];
  uint8_t nonce[16]; /* of the receiver */
  int32_t rank;      /* of the sender */
} hello_t;

static const char hello_magic[8] = {'s', 'l', 'u', 'i', 'c', 'e', 't', '1'};

typedef struct connecting_s {
  sluice_comm_t* parent;
  sluice_tcp_card_t* cards; /* [W] */
  uint64_t deadline_ns;
  int listener;
  int* sockets; /* [W] */
} connecting_t;

static int32_t poll_ms(uint64_t deadline_ns) {
  const uint64_t now_ns = sluice_now_ns();
  const uint64_t left_ms = deadline_ns > now_ns ? (deadline_ns - now_ns + 999999) / 1000000 : 0;
  return left_ms > 1000000 ? 1000000 : (int32_t)left_ms;
}

/* 1: ready, 0: the deadline has passed. */
static int await_socket(int fd, short events, uint64_t deadline_ns) {
  for (;;) {
    struct pollfd p = {.fd = fd, .events = events};
    const int n = poll(&p, 1, poll_ms(deadline_ns));
    if (n > 0) return 1;
    if (n == 0 && sluice_now_ns() >= deadline_ns) return 0;
    if (n < 0 && errno != EINTR) return 0;
  }
}

/* ---- hello ------------------------------------------------------------------------------------------------------- */

static int send_hello(const connecting_t* c, int fd, int32_t peer) {
  hello_t hello = {.rank = c->parent->rank};
  memcpy(hello.magic, hello_magic, sizeof hello.magic);
  memcpy(hello.nonce, c->cards[peer].nonce, sizeof hello.nonce);
  /* The first bytes of a new connection: its buffer takes them whole. */
  return send(fd, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello;
}

/* The rank that speaks at the other end, -1: none of this group, or it says nothing in time. */
static int32_t receive_hello(const connecting_t* c, int fd, uint64_t deadline_ns) {
  hello_t hello;
  size_t used = 0;
  while (used < sizeof hello) {
    const ssize_t n = recv(fd, (char*)&hello + used, sizeof hello - used, MSG_DONTWAIT);
    if (n > 0) {
      used += (size_t)n;
      continue;
    }
    const int is_empty = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (!is_empty || !await_socket(fd, POLLIN, deadline_ns)) return -1;
  }
  const int is_meant = memcmp(hello.magic, hello_magic, sizeof hello_magic) == 0 &&
                       memcmp(hello.nonce, c->cards[c->parent->rank].nonce, sizeof hello.nonce) == 0;
  return is_meant && hello.rank >= 0 && hello.rank < c->parent->world_size ? hello.rank : -1;
}

/* ---- listening, connecting, accepting ---------------------------------------------------------------------------- */

static int listen_on(int family, int backlog, uint16_t* out_port) {
  struct sockaddr_storage address;
  memset(&address, 0, sizeof address); /* any address, any port */
  address.ss_family = (sa_family_t)family;
  socklen_t length = family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
  const int fd = sluice_tcp_open_socket(family);
  if (fd < 0) return -1;
  const int off = 0;
  if (family == AF_INET6) (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); /* takes IPv4 as well */
  if (bind(fd, (struct sockaddr*)&address, length) != 0 || listen(fd, backlog) != 0 ||
      getsockname(fd, (struct sockaddr*)&address, &length) != 0) {
    sluice_tcp_close(fd);
    return -1;
  }
  struct sockaddr_in port; /* its place is the same in both families */
  memcpy(&port, &address, sizeof port);
  *out_port = ntohs(port.sin_port);
  return fd;
}

static sluice_status_t make_card(connecting_t* c, const char* interfaces) {
  sluice_tcp_card_t* mine = &c->cards[c->parent->rank];
  SLUICE_TRY(sluice_tcp_card_init(interfaces, mine));
  c->listener = listen_on(AF_INET6, c->parent->world_size, &mine->port);
  if (c->listener < 0) c->listener = listen_on(AF_INET, c->parent->world_size, &mine->port);
  if (c->listener >= 0) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_FOREIGN, "tcp communicator: rank %d cannot listen: %s", c->parent->rank, strerror(errno));
}

/* Returns a connected socket or -errno. */
static int connect_to(const struct sockaddr_storage* target, socklen_t length, uint64_t deadline_ns) {
  const int fd = sluice_tcp_open_socket(target->ss_family);
  if (fd < 0) return -errno;
  int error = connect(fd, (const struct sockaddr*)target, length) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    socklen_t size = sizeof error;
    if (!await_socket(fd, POLLOUT, deadline_ns)) {
      error = ETIMEDOUT;
    } else if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = errno;
    }
  }
  if (error == 0) return fd;
  sluice_tcp_close(fd);
  return -error;
}

/* The listener's backlog answers, so this waits for no rank. */
static sluice_status_t reach(connecting_t* c, int32_t peer) {
  const sluice_tcp_card_t* mine = &c->cards[c->parent->rank];
  char tried[384] = "";
  int error = ETIMEDOUT;
  for (int32_t attempt = 0; sluice_now_ns() < c->deadline_ns; ++attempt) {
    struct sockaddr_storage target;
    const socklen_t length = sluice_tcp_card_target(mine, &c->cards[peer], attempt, &target);
    if (length == 0) break;
    const int fd = connect_to(&target, length, sluice_min_u64(c->deadline_ns, sluice_now_ns() + ATTEMPT_NS));
    if (fd >= 0 && send_hello(c, fd, peer)) {
      c->sockets[peer] = fd;
      return SLUICE_OK;
    }
    sluice_tcp_close(fd);
    error = fd < 0 ? -fd : ECONNRESET;
    char host[64] = "?";
    (void)getnameinfo((struct sockaddr*)&target, length, host, sizeof host, NULL, 0, NI_NUMERICHOST);
    const size_t used = strlen(tried);
    snprintf(tried + used, sizeof tried - used, "%s%s (%s)", used > 0 ? ", " : "", host, strerror(error));
  }
  return sluice_error_record(SLUICE_E_FOREIGN, c->parent->rank, peer, error,
                             "tcp communicator: rank %d cannot connect to rank %d, port %d, at %s. Let these machines "
                             "reach each other there, or name the interfaces to use",
                             c->parent->rank, peer, c->cards[peer].port, tried[0] != '\0' ? tried : "any address");
}

/* Takes the connections of all higher ranks; strangers are shown the door. */
static sluice_status_t accept_all(connecting_t* c) {
  for (int32_t missing = c->parent->world_size - 1 - c->parent->rank; missing > 0;) {
    const int fd = await_socket(c->listener, POLLIN, c->deadline_ns) ? sluice_tcp_accept(c->listener) : -1;
    if (fd < 0) {
      if (sluice_now_ns() < c->deadline_ns && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) continue;
      int32_t peer = c->parent->rank + 1;
      while (peer < c->parent->world_size - 1 && c->sockets[peer] >= 0) ++peer;
      return SLUICE_FAIL_PEER(SLUICE_E_FOREIGN, c->parent->rank, peer,
                              "tcp communicator: rank %d did not connect to rank %d in time", peer, c->parent->rank);
    }
    const int32_t peer = receive_hello(c, fd, sluice_min_u64(c->deadline_ns, sluice_now_ns() + ATTEMPT_NS));
    if (peer <= c->parent->rank || c->sockets[peer] >= 0 || !send_hello(c, fd, peer)) {
      sluice_tcp_close(fd);
      continue;
    }
    c->sockets[peer] = fd;
    --missing;
  }
  return SLUICE_OK;
}

static sluice_status_t connect_all(connecting_t* c) {
  const int32_t rank = c->parent->rank;
  for (int32_t peer = 0; peer < rank; ++peer) SLUICE_TRY(reach(c, peer));
  SLUICE_TRY(accept_all(c));
  for (int32_t peer = 0; peer < rank; ++peer) {
    if (receive_hello(c, c->sockets[peer], c->deadline_ns) != peer) {
      return SLUICE_FAIL_PEER(SLUICE_E_FOREIGN, rank, peer,
                              "tcp communicator: what answers rank %d on port %d of rank %d is not that rank", rank,
                              c->cards[peer].port, peer);
    }
  }
  for (int32_t peer = 0; peer < c->parent->world_size; ++peer) {
    const int on = 1;
    if (peer != rank) (void)setsockopt(c->sockets[peer], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return SLUICE_OK;
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

/* Every rank's card to every rank, through the parent. */
static sluice_status_t swap_cards(connecting_t* c, sluice_allocator_t* allocator) {
  const int32_t world_size = c->parent->world_size;
  const uint64_t bytes = (uint64_t)world_size * (sizeof(void*) * 2 + sizeof(uint64_t));
  char* block = sluice_alloc(allocator, bytes, "addresses of ranks");
  if (block == NULL) return sluice_alloc_status();
  const void** send = (const void**)(void*)block;
  void** recv = (void**)(void*)(block + (uint64_t)world_size * sizeof(void*));
  uint64_t* sizes = (uint64_t*)(void*)(block + (uint64_t)world_size * 2 * sizeof(void*));
  for (int32_t r = 0; r < world_size; ++r) {
    send[r] = &c->cards[c->parent->rank];
    recv[r] = &c->cards[r];
    sizes[r] = r == c->parent->rank ? 0 : sizeof *c->cards;
  }
  const sluice_exchange_t exchange = {.send = send, .send_bytes = sizes, .recv = recv, .recv_bytes = sizes};
  sluice_comm_request_t* request;
  sluice_status_t status = sluice_comm_exchange_start(c->parent, &exchange, &request);
  if (status == SLUICE_OK) status = sluice_comm_exchange_wait(c->parent, request, "the addresses of all ranks");
  sluice_free(allocator, block, bytes);
  return status;
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

sluice_status_t sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_config_t* config, sluice_status_t mine,
                                   int* out_sockets) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  const uint64_t bytes = (uint64_t)parent->world_size * sizeof(sluice_tcp_card_t);
  connecting_t c = {.parent = parent, .listener = -1, .sockets = out_sockets};
  for (int32_t r = 0; r < parent->world_size; ++r) out_sockets[r] = -1;
  if (mine == SLUICE_OK) {
    c.cards = sluice_alloc_zeroed(allocator, bytes, "addresses of ranks");
    mine = c.cards == NULL ? sluice_alloc_status() : make_card(&c, config->interfaces);
  }
  sluice_status_t status = agree(&c, mine, "is not ready to connect");
  if (status == SLUICE_OK) status = swap_cards(&c, allocator);
  if (status == SLUICE_OK) {
    c.deadline_ns = sluice_now_ns() + config->connect_timeout_ns;
    status = agree(&c, connect_all(&c), "could not connect to all others");
  }
  sluice_tcp_close(c.listener);
  sluice_free(allocator, c.cards, bytes);
  if (status == SLUICE_OK) return SLUICE_OK;
  for (int32_t r = 0; r < parent->world_size; ++r) {
    sluice_tcp_close(out_sockets[r]);
    out_sockets[r] = -1;
  }
  return status;
}
