// SPDX-License-Identifier: Apache-2.0
/* Waits for background work of NCCL. Private to this folder. */
#pragma once

#include "backend/comm/nccl/nccl_state.h"

/* Returns the state of the communicator: 0, IN_PROGRESS, or an error. */
int sluice_nccl_state(nccl_comm_t* comm);
void sluice_nccl_nap(void);
uint64_t sluice_nccl_deadline_of(const nccl_comm_t* comm);
/* Waits for background work of NCCL: creation, connection, launch. */
sluice_status_t sluice_nccl_settle(nccl_comm_t* comm, const char* what, uint64_t deadline_ns);
/* Waits until all ranks of the group have joined. The device is entered. */
sluice_status_t sluice_nccl_make_ready(nccl_comm_t* comm, uint64_t deadline_ns);
