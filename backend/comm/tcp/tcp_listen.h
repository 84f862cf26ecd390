// SPDX-License-Identifier: Apache-2.0
/* The listeners of a rank: on all its addresses, only on those of the named interfaces, or at the endpoint that the
 * caller gave. */
#pragma once

#include "backend/comm/tcp/tcp_address.h"

typedef struct sluice_tcp_listeners_s {
  int fds[SLUICE_TCP_MAX_ADDRESSES];
  int32_t count;
} sluice_tcp_listeners_t;

/* Writes the ports into `card`, whose addresses are set; of named interfaces only the addresses that can be listened on
 * are kept. On a failure nothing is open. Errors: EXTERNAL. */
sluice_status_t sluice_tcp_listen(int32_t rank, int is_named, sluice_tcp_card_t* card,
                                  sluice_tcp_listeners_t* out_listeners);
/* Listens at the port of this endpoint: on its address if that is numeric, otherwise on all addresses of this rank.
 * Errors: EXTERNAL (the port is in use, or the address is not this machine's). */
sluice_status_t sluice_tcp_listen_at(int32_t rank, const sluice_tcp_endpoint_t* endpoint,
                                     sluice_tcp_listeners_t* out_listeners);
void sluice_tcp_listeners_close(sluice_tcp_listeners_t* listeners);
