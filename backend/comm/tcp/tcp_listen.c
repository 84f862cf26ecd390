#include "backend/comm/tcp/tcp_listen.h"

#include <errno.h>
#include <string.h>

#include "backend/comm/tcp/tcp_descriptors.h"

/* Connections that the system finishes before this rank has looked: all ranks of a large group, and strangers before
 * them. The system takes less where its administrator has said so (net.core.somaxconn). */
enum { BACKLOG = 4096 };

/* Returns a listening socket, with its port, or -1 with errno. is_any: of IPv6, for both families. */
static int listen_at(const struct sockaddr_storage* where, socklen_t length, int is_any, uint16_t* out_port) {
  struct sockaddr_storage address = *where;
  const int fd = sluice_tcp_open_socket(address.ss_family);
  if (fd < 0) return -1;
  const int is_one_family = !is_any;
  if (address.ss_family == AF_INET6) {
    (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &is_one_family, sizeof is_one_family);
  }
  if (bind(fd, (struct sockaddr*)&address, length) != 0 || listen(fd, BACKLOG) != 0 ||
      getsockname(fd, (struct sockaddr*)&address, &length) != 0) {
    const int error = errno;
    sluice_tcp_close(fd);
    errno = error;
    return -1;
  }
  struct sockaddr_in port; /* its place is the same in both families */
  memcpy(&port, &address, sizeof port);
  *out_port = ntohs(port.sin_port);
  return fd;
}

static int listen_on_all(int family, uint16_t* out_port) {
  struct sockaddr_storage any; /* any address, any port */
  memset(&any, 0, sizeof any);
  any.ss_family = (sa_family_t)family;
  return listen_at(&any, family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in), 1, out_port);
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

void sluice_tcp_listeners_close(sluice_tcp_listeners_t* listeners) {
  for (int32_t i = 0; i < listeners->count; ++i) sluice_tcp_close(listeners->fds[i]);
  listeners->count = 0;
}
