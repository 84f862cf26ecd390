// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"

/* ---- this rank's card -------------------------------------------------------------------------------------------- */

/* Identifies the machine since its last boot, and its network namespace. Left empty if the system does not report them:
 * then two ranks of one machine use an address of its interfaces. */
static void identify_place(uint8_t out[32]) {
  memset(out, 0, 32);
  FILE* file = fopen("/proc/sys/kernel/random/boot_id", "re");
  char boot[40] = "";
  struct stat space;
  if (file == NULL) return;
  const int is_read = fgets(boot, sizeof boot, file) != NULL;
  fclose(file);
  if (!is_read || stat("/proc/self/ns/net", &space) != 0) return;
  const uint64_t inode = (uint64_t)space.st_ino;
  memcpy(out, &inode, sizeof inode);
  /* 36 characters; the hyphens and the fixed ones carry no information, so the first 24 are enough. */
  memcpy(out + sizeof inode, boot, 24);
}

static int is_listed(const char* interfaces, const char* name) {
  const size_t length = strlen(name);
  for (const char* at = interfaces; at != NULL && *at != '\0';) {
    const size_t word = strcspn(at, ",");
    if (word == length && memcmp(at, name, length) == 0) return 1;
    at += word;
    if (*at == ',') ++at;
  }
  return 0;
}

int sluice_tcp_address_read(const struct sockaddr* address, sluice_tcp_address_t* out) {
  memset(out, 0, sizeof *out);
  if (address == NULL) return 0;
  if (address->sa_family == AF_INET) {
    struct sockaddr_in in;
    memcpy(&in, address, sizeof in);
    out->family = 4;
    memcpy(out->bytes, &in.sin_addr, 4);
    return 1;
  }
  if (address->sa_family == AF_INET6) {
    struct sockaddr_in6 in;
    memcpy(&in, address, sizeof in);
    if (IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr)) return 0;
    out->family = 6;
    memcpy(out->bytes, &in.sin6_addr, 16);
    return 1;
  }
  return 0;
}

static void add(sluice_tcp_card_t* card, const sluice_tcp_address_t* address) {
  for (int32_t i = 0; i < card->num_addresses; ++i) {
    if (memcmp(&card->addresses[i], address, sizeof *address) == 0) return;
  }
  if (card->num_addresses < SLUICE_TCP_MAX_ADDRESSES) card->addresses[card->num_addresses++] = *address;
}

/* Adds the addresses of the named interfaces, or of all that are (not) loopback; with `only`, just that one. */
static void add_own(const struct ifaddrs* all, const char* interfaces, int want_loopback, sluice_tcp_card_t* card,
                    const sluice_tcp_address_t* only) {
  for (const struct ifaddrs* i = all; i != NULL; i = i->ifa_next) {
    sluice_tcp_address_t address;
    if ((i->ifa_flags & IFF_UP) == 0 || !sluice_tcp_address_read(i->ifa_addr, &address)) continue;
    if (interfaces != NULL ? !is_listed(interfaces, i->ifa_name) : !!(i->ifa_flags & IFF_LOOPBACK) != want_loopback) {
      continue;
    }
    if (only == NULL || memcmp(only, &address, sizeof address) == 0) add(card, &address);
  }
}

/* Adds the addresses that the machine's host name resolves to, if the machine has them: with several networks, the
 * administrator selects with this name the one that peers should use. */
static void add_named(const struct ifaddrs* all, sluice_tcp_card_t* card) {
  char name[256];
  struct addrinfo* found = NULL;
  if (gethostname(name, sizeof name) != 0) return;
  name[sizeof name - 1] = '\0';
  const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
  if (getaddrinfo(name, NULL, &hints, &found) != 0) return;
  for (const struct addrinfo* i = found; i != NULL; i = i->ai_next) {
    sluice_tcp_address_t address;
    if (sluice_tcp_address_read(i->ai_addr, &address)) add_own(all, NULL, 0, card, &address);
  }
  freeaddrinfo(found);
}

static sluice_status_t fail_without_address(const struct ifaddrs* all, const char* interfaces) {
  char names[256] = "";
  for (const struct ifaddrs* i = all; i != NULL; i = i->ifa_next) {
    sluice_tcp_address_t address;
    if ((i->ifa_flags & IFF_UP) == 0 || !sluice_tcp_address_read(i->ifa_addr, &address) ||
        is_listed(names, i->ifa_name))
      continue;
    const size_t used = strlen(names);
    snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? "," : "", i->ifa_name);
  }
  return SLUICE_FAIL(SLUICE_E_NOT_FOUND,
                     "tcp communicator: no interface of \"%s\" is up and has an address; those that do: %s",
                     interfaces != NULL ? interfaces : "this machine", names[0] != '\0' ? names : "none");
}

sluice_status_t sluice_tcp_card_init(const char* interfaces, sluice_tcp_card_t* out_card) {
  memset(out_card, 0, sizeof *out_card);
  identify_place(out_card->place);
  if (getrandom(out_card->secret, sizeof out_card->secret, 0) != (ssize_t)sizeof out_card->secret) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "tcp communicator: getrandom failed: %s", strerror(errno));
  }
  struct ifaddrs* all = NULL;
  if (getifaddrs(&all) != 0) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "tcp communicator: getifaddrs failed: %s", strerror(errno));
  }
  if (interfaces != NULL && interfaces[0] == '\0') interfaces = NULL;
  if (interfaces == NULL) add_named(all, out_card);
  add_own(all, interfaces, 0, out_card, NULL);
  if (out_card->num_addresses == 0 && interfaces == NULL) add_own(all, NULL, 1, out_card, NULL);
  const sluice_status_t status = out_card->num_addresses > 0 ? SLUICE_OK : fail_without_address(all, interfaces);
  freeifaddrs(all);
  return status;
}

/* ---- another rank's card ----------------------------------------------------------------------------------------- */

socklen_t sluice_tcp_address_fill(const sluice_tcp_address_t* address, struct sockaddr_storage* out_target) {
  memset(out_target, 0, sizeof *out_target);
  if (address->family == 4) {
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(address->port)};
    memcpy(&in.sin_addr, address->bytes, 4);
    memcpy(out_target, &in, sizeof in);
    return sizeof in;
  }
  struct sockaddr_in6 in = {.sin6_family = AF_INET6, .sin6_port = htons(address->port)};
  memcpy(&in.sin6_addr, address->bytes, 16);
  memcpy(out_target, &in, sizeof in);
  return sizeof in;
}

socklen_t sluice_tcp_card_target(const sluice_tcp_card_t* mine, const sluice_tcp_card_t* theirs, int32_t attempt,
                                 struct sockaddr_storage* out_target) {
  static const uint8_t unknown[sizeof mine->place];
  const int is_same_place =
      memcmp(mine->place, theirs->place, sizeof unknown) == 0 && memcmp(mine->place, unknown, sizeof unknown) != 0;
  if (is_same_place && theirs->any_port != 0) {
    /* Loopback is not subject to a firewall. */
    const sluice_tcp_address_t loopback = {.family = 4, .bytes = {127, 0, 0, 1}, .port = theirs->any_port};
    if (attempt == 0) return sluice_tcp_address_fill(&loopback, out_target);
    --attempt;
  }
  if (attempt >= theirs->num_addresses || attempt >= SLUICE_TCP_MAX_ADDRESSES) return 0;
  return sluice_tcp_address_fill(&theirs->addresses[attempt], out_target);
}

/* ---- endpoints --------------------------------------------------------------------------------------------------- */

enum { MAX_HOST = 256 };

static int32_t count_entries(const char* addresses) {
  int32_t count = 1;
  for (const char* at = addresses; *at != '\0'; ++at) count += *at == ',';
  return count;
}

/* Splits one entry. Returns 0 if it is no "host:port". */
static int split(const char* entry, size_t length, char host[MAX_HOST], uint16_t* out_port) {
  size_t end = length;
  while (end > 0 && entry[end - 1] != ':') --end;
  if (end == 0 || length - end < 1 || length - end > 5) return 0;
  long port = 0;
  for (size_t i = end; i < length; ++i) {
    if (entry[i] < '0' || entry[i] > '9') return 0;
    port = 10 * port + (entry[i] - '0');
  }
  const char* from = entry;
  size_t bytes = end - 1;
  const int is_bracketed = bytes >= 2 && from[0] == '[' && from[bytes - 1] == ']';
  if (is_bracketed) {
    ++from;
    bytes -= 2;
  } else if (memchr(from, ':', bytes) != NULL) {
    return 0;
  }
  if (bytes == 0 || bytes >= MAX_HOST || port < 1 || port > 65535) return 0;
  memcpy(host, from, bytes);
  host[bytes] = '\0';
  *out_port = (uint16_t)port;
  return 1;
}

static void take(const struct addrinfo* found, sluice_tcp_endpoint_t* out) {
  for (const struct addrinfo* i = found; i != NULL && out->num_addresses < SLUICE_TCP_MAX_ADDRESSES; i = i->ai_next) {
    sluice_tcp_address_t* address = &out->addresses[out->num_addresses];
    if (!sluice_tcp_address_read(i->ai_addr, address)) continue;
    address->port = out->port;
    ++out->num_addresses;
  }
}

static sluice_status_t look_up(const char* host, uint64_t deadline_ns, sluice_tcp_endpoint_t* out) {
  const struct timespec pause = {.tv_nsec = 200000000};
  struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
  struct addrinfo* found = NULL;
  int error = getaddrinfo(host, NULL, &hints, &found);
  out->is_numeric = error == 0;
  hints.ai_flags = 0;
  while (error != 0 && (error = getaddrinfo(host, NULL, &hints, &found)) == EAI_AGAIN &&
         sluice_now_ns() < deadline_ns) {
    nanosleep(&pause, NULL);
  }
  if (error == 0) {
    take(found, out);
    freeaddrinfo(found);
  }
  if (out->num_addresses > 0) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "tcp communicator: \"%s\" has no address: %s", out->text,
                     error != 0 ? gai_strerror(error) : "only link-local addresses, which do not name an interface");
}

sluice_status_t sluice_tcp_endpoints_read(const char* addresses, int32_t rank, int32_t world_size, uint64_t deadline_ns,
                                          sluice_tcp_endpoint_t* out_endpoints) {
  const int32_t count = count_entries(addresses);
  memset(out_endpoints, 0, (size_t)world_size * sizeof *out_endpoints);
  if (count != 1 && count != world_size) {
    return SLUICE_FAIL_PEER(SLUICE_E_INVALID_ARGUMENT, rank, -1,
                            "sluice_comm_create_tcp_at: addresses has %d entries for %d ranks; give one for each rank, "
                            "or that of rank 0 alone",
                            count, world_size);
  }
  const char* at = addresses;
  for (int32_t r = 0; r < count; ++r) {
    char host[MAX_HOST];
    sluice_tcp_endpoint_t* endpoint = &out_endpoints[r];
    const size_t length = strcspn(at, ",");
    const size_t kept = length < sizeof endpoint->text ? length : sizeof endpoint->text - 1;
    memcpy(endpoint->text, at, kept);
    if (!split(at, length, host, &endpoint->port)) {
      return SLUICE_FAIL_PEER(SLUICE_E_INVALID_ARGUMENT, rank, -1,
                              "sluice_comm_create_tcp_at: addresses: \"%s\" of rank %d is not a \"host:port\" with a "
                              "port from 1 to 65535; IPv6 is written \"[host]:port\"",
                              endpoint->text, r);
    }
    SLUICE_TRY(look_up(host, deadline_ns, endpoint));
    at += length + 1;
  }
  return SLUICE_OK;
}
