// SPDX-License-Identifier: Apache-2.0
/* Headers over separate TCP connections. Private to this folder. */
#pragma once

#include "backend/comm/nccl/nccl_state.h"

/* The vtable's entry. The first call makes the connections, on all ranks or on none; without them headers are
 * staged. */
sluice_status_t sluice_nccl_headers_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                          sluice_comm_request_t** out_request);
/* The parts of exchange_wait and abandon for a request of headers_start that uses the connections. */
sluice_status_t sluice_nccl_headers_wait(nccl_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                         int32_t* out_peer);
void sluice_nccl_headers_abandon(nccl_comm_t* comm, sluice_comm_request_t* request);
/* Closes the connections. The other ranks learn whether this one leaves or has failed. */
void sluice_nccl_headers_close(nccl_comm_t* comm);
