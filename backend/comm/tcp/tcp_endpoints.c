// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_endpoints.h"

#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/base/clock.h"

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
