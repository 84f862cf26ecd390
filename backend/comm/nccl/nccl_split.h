// SPDX-License-Identifier: Apache-2.0
/* Makes a communicator from the host's own. Private to this folder. */
#pragma once

#include "backend/comm/nccl/nccl_state.h"

/* Sets comm->comm from the host's communicator; waits until the split is complete, or until the deadline. */
sluice_status_t sluice_nccl_split(nccl_comm_t* comm, void* parent, int32_t color, sluice_nccl_config_t* config);
