// SPDX-License-Identifier: Apache-2.0
/* Makes one connection between every two ranks, with the help of what the ranks already share: a communicator, or the
 * connections of their rendezvous (tcp_rendezvous.h). */
#pragma once

#include "backend/comm/comm.h"
#include "backend/comm/tcp/tcp_connection.h"
#include "backend/comm/tcp/tcp_listen.h"

#define SLUICE_TCP_CONNECT_NS UINT64_C(30000000000) /* until all connections are made; the default of the config */

/* How ranks reach each other: the caller's config, checked and with its defaults filled in. */
typedef struct sluice_tcp_way_s {
  const char* interfaces; /* NULL or empty: all that are up */
  uint64_t connect_timeout_ns;
  const uint8_t* key;                     /* [SLUICE_TCP_MAC_BYTES]; NULL: secrets are sent through the parent */
  const sluice_tcp_endpoint_t* endpoints; /* [W]; NULL: the caller gave none */
} sluice_tcp_way_t;

/* The ranks' existing means of communication, used while they connect. All calls are collective. */
typedef struct sluice_tcp_parent_s sluice_tcp_parent_t;
struct sluice_tcp_parent_s {
  int32_t rank, world_size;
  /* All-gather. records: [W]. */
  sluice_status_t (*swap)(sluice_tcp_parent_t* parent, void* records, uint64_t record_bytes, const char* phase);
  /* Replaces the value by the maximum over all ranks. */
  sluice_status_t (*max)(sluice_tcp_parent_t* parent, int64_t* value, const char* phase);
};

/* Sets the sockets of connections[W], which are -1 before (this rank's stays so): connected, non-blocking, closed on
 * exec. Collective over the parent, with the same arguments on all ranks: all get their connections or all fail, with
 * no socket set.
 *
 *   mine    this rank's earlier status: a failure is told to the other ranks and returned here
 *
 * With a key no secret is sent: the secret of a rank is a code of the number in its card, under the key.
 *
 * Errors: NOT_FOUND (no address of these interfaces), PEER_REFUSED (names the rank that failed), EXTERNAL (names the
 * rank that was not reached), NO_MEMORY; all others come from the parent. */
sluice_status_t sluice_tcp_connect_over(sluice_tcp_parent_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                        sluice_tcp_connection_t* connections);
/* The same over a communicator, which ends after an error of its exchanges. */
sluice_status_t sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                   sluice_tcp_connection_t* connections);

/* ---- private to tcp_connect.c and tcp_mesh.c: every rank of the group connects to every other, undisturbed by
 * connections of other programs ---- */

typedef struct sluice_tcp_mesh_s sluice_tcp_mesh_t;

/* Allocates all memory that connecting needs. Error: NO_MEMORY. */
sluice_status_t sluice_tcp_mesh_create(int32_t rank, int32_t world_size, sluice_tcp_mesh_t** out_meeting);
void sluice_tcp_mesh_destroy(sluice_tcp_mesh_t* meeting); /* accepts NULL */
/* Sets the sockets of connections[W], also in part on a failure; the caller closes them. Connects to lower ranks and
 * accepts higher ones. Errors: EXTERNAL, naming the rank that was not reached, or that there are no descriptors. */
sluice_status_t sluice_tcp_mesh_connect(sluice_tcp_mesh_t* meeting, const sluice_tcp_card_t* cards,
                                        const sluice_tcp_listeners_t* listeners, uint64_t deadline_ns,
                                        sluice_tcp_connection_t* connections);
