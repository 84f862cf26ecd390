// SPDX-License-Identifier: Apache-2.0
/* One connection between every two ranks, found with the help of what the ranks already share: a communicator, or the
 * connections to the place where they met (tcp_rendezvous.h). */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_CONNECT_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_CONNECT_H_

#include "backend/comm/comm.h"
#include "backend/comm/tcp/tcp_endpoints.h"

#define SLUICE_TCP_CONNECT_NS UINT64_C(30000000000) /* until all connections stand, where a config does not say */

/* How ranks reach each other: what the caller said, checked and with its defaults filled in. */
typedef struct sluice_tcp_way_s {
  const char* interfaces; /* NULL or empty: all that are up */
  uint64_t connect_timeout_ns;
  const uint8_t* key;                     /* [SLUICE_TCP_MAC_BYTES]; NULL: secrets travel through the parent */
  const sluice_tcp_endpoint_t* endpoints; /* [W]; NULL: the caller named none */
} sluice_tcp_way_t;

/* What the ranks share while they connect. All calls are collective. */
typedef struct sluice_tcp_parent_s sluice_tcp_parent_t;
struct sluice_tcp_parent_s {
  int32_t rank, world_size;
  /* Every rank's record to every rank. records: [W]. */
  sluice_status_t (*swap)(sluice_tcp_parent_t* parent, void* records, uint64_t record_bytes, const char* phase);
  /* Replaces the value by the largest of all ranks. */
  sluice_status_t (*max)(sluice_tcp_parent_t* parent, int64_t* value, const char* phase);
};

/* Fills out_sockets[W] (the own entry is -1): connected, not blocking, closed on exec. Collective over the parent, and
 * alike on all its ranks: all get their connections or all fail, with out_sockets all -1.
 *
 * mine    what this rank has come with: a failure is told to the others and returned here
 *
 * With a key no secret is sent: the secret of a rank is a code of the number that its card has, under the key.
 *
 * Errors: NOT_FOUND (no address of these interfaces), PEER_REFUSED (naming the rank that could not), EXTERNAL (naming
 * the rank that was not reached), NO_MEMORY; all else comes from the parent. */
sluice_status_t sluice_tcp_connect_over(sluice_tcp_parent_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                        int* out_sockets);
/* The same over a communicator, which an error of its exchanges ends. */
sluice_status_t sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                   int* out_sockets);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_CONNECT_H_ */
