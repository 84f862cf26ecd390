// SPDX-License-Identifier: Apache-2.0
/* Where a rank can be reached: what it tells the others before they connect. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_ADDRESS_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_ADDRESS_H_

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

/* Sent to all ranks as it is: one kind of machine, one build. */
typedef struct sluice_tcp_card_s {
  uint8_t place[32]; /* equal on two ranks: same machine, same network namespace */
  /* New for each communicator. Both ends of a connection to this rank prove that they know it (tcp_hello.h); it is sent
   * through the parent alone. Where ranks have a key it is no secret, and what they prove is its code (tcp_connect.h).
   */
  uint8_t secret[16];
  uint16_t any_port; /* of a listener on all addresses, loopback among them; 0: there is none */
  uint8_t num_addresses;
  sluice_tcp_address_t addresses[SLUICE_TCP_MAX_ADDRESSES]; /* the likeliest first */
} sluice_tcp_card_t;

/* Fills everything but the ports. interfaces: comma-separated names, NULL: all that are up. Loopback counts only where
 * it is named or nothing else is there. Errors: NOT_FOUND (names the interfaces that there are), EXTERNAL. */
sluice_status_t sluice_tcp_card_init(const char* interfaces, sluice_tcp_card_t* out_card);
/* 0: NULL, of another family, or valid on its own link alone (it would need an interface number on the other side). The
 * port is not read. */
int sluice_tcp_address_read(const struct sockaddr* address, sluice_tcp_address_t* out);
/* The form that the system takes; returns its length. */
socklen_t sluice_tcp_address_fill(const sluice_tcp_address_t* address, struct sockaddr_storage* out_target);
/* The address to use for the rank with this card, by `mine` of this one, at attempt 0, 1, ...; 0 when there is none. */
socklen_t sluice_tcp_card_target(const sluice_tcp_card_t* mine, const sluice_tcp_card_t* theirs, int32_t attempt,
                                 struct sockaddr_storage* out_target);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_ADDRESS_H_ */
