// SPDX-License-Identifier: Apache-2.0
/* Loads libsluice_mpi.so on demand: libsluice itself does not depend on MPI. */
#pragma once

#include "backend/comm/comm.h"

/* sluice_comm_create_mpi with the length above which a block is split into several messages; 0 = 1 GiB. */
sluice_status_t sluice_mpi_comm_create(const sluice_comm_config_t* config, int64_t mpi_comm_f, const char* library,
                                       uint64_t max_message_bytes, sluice_comm_t** out_comm);
