// SPDX-License-Identifier: Apache-2.0
/* The addresses that a caller gives if the ranks share no communicator: "host:port" for each rank, or only for rank
 * 0. */
#pragma once

#include "backend/comm/tcp/tcp_address.h"

typedef struct sluice_tcp_endpoint_s {
  uint16_t port; /* 0: the system chooses a port, and the rank tells the others */
  uint8_t
      is_numeric; /* the rank listens only at this address; a name may also resolve to addresses of other machines */
  uint8_t num_addresses; /* with a port: at least 1 */
  char text[80];         /* as the caller wrote it, for messages; truncated if longer */
  sluice_tcp_address_t addresses[SLUICE_TCP_MAX_ADDRESSES];
} sluice_tcp_endpoint_t;

/* Reads "host:port,host:port,...", with [host] for IPv6. One entry is the address of rank 0; world_size entries are
 * those of all ranks. out_endpoints: [world_size]. Names are resolved, with retries until the deadline if the system
 * reports a temporary failure. Errors: INVALID_ARGUMENT, NOT_FOUND (an unknown name). */
sluice_status_t sluice_tcp_endpoints_read(const char* addresses, int32_t rank, int32_t world_size, uint64_t deadline_ns,
                                          sluice_tcp_endpoint_t* out_endpoints);
