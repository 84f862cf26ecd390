// SPDX-License-Identifier: Apache-2.0
/* Exchanges in stream order. nccl_comm.h has the vtable's entries. Private to this folder. */
#pragma once

#include "backend/comm/nccl/nccl_state.h"

/* Enqueues one exchange of device memory. The device is entered. */
sluice_status_t sluice_nccl_run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream);
/* Exchanges enqueued between these two calls are one NCCL group (comm.h). */
void sluice_nccl_group_begin(sluice_comm_t* base);
sluice_status_t sluice_nccl_group_end(sluice_comm_t* base, sluice_stream_t stream, sluice_status_t status);
/* Frees the list of messages. */
void sluice_nccl_forget_posted(nccl_comm_t* comm);
