// SPDX-License-Identifier: Apache-2.0
/* The addresses that a caller gives to ranks that share no communicator: "host:port", one for each rank or one alone.
 */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_ENDPOINTS_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_ENDPOINTS_H_

#include "backend/comm/tcp/tcp_address.h"

typedef struct sluice_tcp_endpoint_s {
  uint16_t port;         /* 0: the system chooses, and the rank tells the others */
  uint8_t is_numeric;    /* the rank listens at this address alone; a name may stand for others than its own */
  uint8_t num_addresses; /* with a port: at least 1 */
  char text[80];         /* as the caller wrote it, for messages; cut where it is longer */
  sluice_tcp_address_t addresses[SLUICE_TCP_MAX_ADDRESSES];
} sluice_tcp_endpoint_t;

/* Reads "host:port,host:port,...", with [host] for IPv6. One entry is where rank 0 is; world_size entries are where
 * each rank is. out_endpoints: [world_size]. Names are looked up, again until the deadline where the system says that
 * it may know them later. Errors: INVALID_ARGUMENT, NOT_FOUND (a name that nobody knows). */
sluice_status_t sluice_tcp_endpoints_read(const char* addresses, int32_t rank, int32_t world_size, uint64_t deadline_ns,
                                          sluice_tcp_endpoint_t* out_endpoints);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_ENDPOINTS_H_ */
