// SPDX-License-Identifier: Apache-2.0
/* The addresses at which a rank can be reached, which it sends to the other ranks before they connect. */
#pragma once

#include <netinet/in.h>
#include <stdint.h>
#include <sys/socket.h>

#include "backend/base/status.h"

enum { SLUICE_TCP_MAX_ADDRESSES = 8 };

typedef struct sluice_tcp_address_s {
  uint16_t family; /* 4 or 6 */
  uint16_t port;
  uint8_t bytes[16];
} sluice_tcp_address_t;

/* Sent to all ranks in native layout: all ranks have the same architecture and build. */
typedef struct sluice_tcp_card_s {
  uint8_t place[32]; /* equal on two ranks: same machine, same network namespace */
  /* New for each communicator, and sent only through the parent. Both ends of a connection to this rank prove knowledge
   * of it during the handshake (tcp_hello.h). If ranks have a key, this is no secret, and they prove knowledge of its
   * code (tcp_connect.h). */
  uint8_t secret[16];
  uint16_t any_port; /* of a listener on all addresses, including loopback; 0: there is none */
  uint8_t num_addresses;
  sluice_tcp_address_t addresses[SLUICE_TCP_MAX_ADDRESSES]; /* most likely first */
} sluice_tcp_card_t;

/* Fills everything but the ports. interfaces: comma-separated names; NULL: all that are up. Loopback is used only if it
 * is named or there is nothing else. Errors: NOT_FOUND (lists the existing interfaces), EXTERNAL. */
sluice_status_t sluice_tcp_card_init(const char* interfaces, sluice_tcp_card_t* out_card);
/* Returns 0 if the address is NULL, of another family, or link-local (the other side would need an interface number).
 * The port is not read. */
int sluice_tcp_address_read(const struct sockaddr* address, sluice_tcp_address_t* out);
/* Converts to the system's form; returns its length. */
socklen_t sluice_tcp_address_fill(const sluice_tcp_address_t* address, struct sockaddr_storage* out_target);
/* Returns in out_target the address to use for the rank with card `theirs`, at attempt 0, 1, ...; 0 after the last one.
 * mine: the card of this rank. */
socklen_t sluice_tcp_card_target(const sluice_tcp_card_t* mine, const sluice_tcp_card_t* theirs, int32_t attempt,
                                 struct sockaddr_storage* out_target);

/* An address that a caller gives if the ranks share no communicator: "host:port" of each rank, or of rank 0 alone. */
typedef struct sluice_tcp_endpoint_s {
  uint16_t port; /* 0: the system chooses a port, and the rank tells the others */
  /* The rank listens only at this address; a name may also resolve to addresses of other machines. */
  uint8_t is_numeric;
  uint8_t num_addresses; /* with a port: at least 1 */
  char text[80];         /* as the caller wrote it, for messages; truncated if longer */
  sluice_tcp_address_t addresses[SLUICE_TCP_MAX_ADDRESSES];
} sluice_tcp_endpoint_t;

/* Reads "host:port,host:port,...", with [host] for IPv6. One entry is the address of rank 0; world_size entries are
 * those of all ranks. out_endpoints: [world_size]. Names are resolved, with retries until the deadline if the system
 * reports a temporary failure. Errors: INVALID_ARGUMENT, NOT_FOUND (an unknown name). */
sluice_status_t sluice_tcp_endpoints_read(const char* addresses, int32_t rank, int32_t world_size, uint64_t deadline_ns,
                                          sluice_tcp_endpoint_t* out_endpoints);
