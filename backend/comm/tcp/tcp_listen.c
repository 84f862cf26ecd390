// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_listen.h"

#include <errno.h>
#include <string.h>

#include "backend/comm/tcp/tcp_descriptors.h"

/* Connections that the system may complete before this rank accepts them: all ranks of a large group, and strangers
 * before them. The system uses less if net.core.somaxconn is lower. */
enum { BACKLOG = 4096 };

/* The port is at the same offset in both families. */
static uint16_t port_of(const struct sockaddr_storage* address) {
  struct sockaddr_in port;
  memcpy(&port, address, sizeof port);
  return ntohs(port.sin_port);
}

/* Returns a listening socket, with its port, or -1 with errno. is_any: an IPv6 socket for both families. */
static int listen_at(const struct sockaddr_storage* where, socklen_t length, int is_any, uint16_t* out_port) {
  struct sockaddr_storage address = *where;
  const int fd = sluice_tcp_open_socket(address.ss_family);
  if (fd < 0) return -1;
  const int is_one_family = !is_any;
  if (address.ss_family == AF_INET6) {
    (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &is_one_family, sizeof is_one_family);
  }
  /* A port that the caller chose is reused by the next group, whose ranks may start at once. */
  const int is_chosen = port_of(&address) != 0, on = 1;
  if (is_chosen) (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, (struct sockaddr*)&address, length) != 0 || listen(fd, BACKLOG) != 0 ||
      getsockname(fd, (struct sockaddr*)&address, &length) != 0) {
    const int error = errno;
    sluice_tcp_close(fd);
    errno = error;
    return -1;
  }
  *out_port = port_of(&address);
  return fd;
}

/* in_out_port 0: any port. */
static int listen_on_all(int family, uint16_t* in_out_port) {
  const sluice_tcp_address_t all = {.family = family == AF_INET6 ? 6 : 4, .port = *in_out_port};
  struct sockaddr_storage any;
  (void)sluice_tcp_address_fill(&all, &any);
  return listen_at(&any, family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in), 1, in_out_port);
}

static void listen_on_named(sluice_tcp_card_t* card, sluice_tcp_listeners_t* listeners) {
  int32_t kept = 0;
  for (int32_t i = 0; i < card->num_addresses; ++i) {
    struct sockaddr_storage where;
    sluice_tcp_address_t address = card->addresses[i];
    const socklen_t length = sluice_tcp_address_fill(&address, &where);
    const int fd = listen_at(&where, length, 0, &address.port);
    if (fd < 0) continue; /* an address that the interface is about to get, or to lose */
    listeners->fds[listeners->count++] = fd;
    card->addresses[kept++] = address;
  }
  card->num_addresses = (uint8_t)kept;
}

sluice_status_t sluice_tcp_listen(int32_t rank, int is_named, sluice_tcp_card_t* card,
                                  sluice_tcp_listeners_t* out_listeners) {
  out_listeners->count = 0;
  if (is_named) {
    listen_on_named(card, out_listeners);
  } else {
    int fd = listen_on_all(AF_INET6, &card->any_port);
    if (fd < 0) fd = listen_on_all(AF_INET, &card->any_port);
    if (fd >= 0) out_listeners->fds[out_listeners->count++] = fd;
    for (int32_t i = 0; i < card->num_addresses; ++i) card->addresses[i].port = card->any_port;
  }
  if (out_listeners->count > 0) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "tcp communicator: rank %d cannot listen: %s", rank, strerror(errno));
}

sluice_status_t sluice_tcp_listen_at(int32_t rank, const sluice_tcp_endpoint_t* endpoint,
                                     sluice_tcp_listeners_t* out_listeners) {
  struct sockaddr_storage where;
  uint16_t port = endpoint->port;
  const socklen_t length = sluice_tcp_address_fill(&endpoint->addresses[0], &where);
  int fd = endpoint->is_numeric ? listen_at(&where, length, 0, &port) : listen_on_all(AF_INET6, &port);
  if (fd < 0 && !endpoint->is_numeric && errno != EADDRINUSE) fd = listen_on_all(AF_INET, &port);
  out_listeners->count = 0;
  if (fd < 0) {
    const int error = errno;
    return sluice_error_record(SLUICE_E_EXTERNAL, rank, -1, error,
                               "tcp communicator: rank %d cannot listen at %s: %s. %s", rank, endpoint->text,
                               strerror(error),
                               error == EADDRINUSE ? "Another process uses this port: a second process with this rank, "
                                                     "or an earlier run? Otherwise choose another port"
                               : error == EADDRNOTAVAIL ? "Give an address of the machine that this rank runs on"
                                                        : "Choose another address");
  }
  out_listeners->fds[out_listeners->count++] = fd;
  return SLUICE_OK;
}

void sluice_tcp_listeners_close(sluice_tcp_listeners_t* listeners) {
  for (int32_t i = 0; i < listeners->count; ++i) sluice_tcp_close(listeners->fds[i]);
  listeners->count = 0;
}
