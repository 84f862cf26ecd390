/* One connection between every two ranks, found with the help of a communicator that they already share. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_CONNECT_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_CONNECT_H_

#include "backend/comm/comm.h"

#define SLUICE_TCP_CONNECT_NS UINT64_C(30000000000) /* until all connections stand, where a config does not say */

/* Fills out_sockets[W] (the own entry is -1): connected, not blocking, closed on exec. Collective over the parent, and
 * alike on all its ranks: all get their connections or all fail, with out_sockets all -1.
 *
 * config  checked, with its defaults filled in
 * mine    what this rank has come with: a failure is told to the others and returned here
 *
 * Errors: NOT_FOUND (no address of these interfaces), PEER_REFUSED (naming the rank that could not), EXTERNAL (naming
 * the rank that was not reached), NO_MEMORY; all else comes from the parent's exchanges, and ends the parent. */
sluice_status_t sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_config_t* config, sluice_status_t mine,
                                   int* out_sockets);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_CONNECT_H_ */
