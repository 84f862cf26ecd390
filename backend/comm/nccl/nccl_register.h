// SPDX-License-Identifier: Apache-2.0
/* The registered buffers of a communicator. Private to this folder. */
#pragma once

#include "backend/comm/nccl/nccl_state.h"

const char* sluice_nccl_refusal_of_memory(sluice_comm_t* base);
sluice_status_t sluice_nccl_allocate(sluice_comm_t* base, uint64_t bytes, void** out_data);
void sluice_nccl_release(sluice_comm_t* base, void* data);
