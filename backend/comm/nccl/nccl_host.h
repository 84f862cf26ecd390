// SPDX-License-Identifier: Apache-2.0
/* Exchanges of host memory through staging, with a wait. Private to this folder. */
#pragma once

#include "backend/comm/nccl/nccl_state.h"

sluice_status_t sluice_nccl_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request);
sluice_status_t sluice_nccl_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                          int32_t* out_peer);
void sluice_nccl_abandon(sluice_comm_t* base, sluice_comm_request_t* request);
