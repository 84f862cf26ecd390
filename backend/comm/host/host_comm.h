// SPDX-License-Identifier: Apache-2.0
/* A communicator over callbacks into a host's process group. Plugins (mpi) use it as well. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/comm/sized_messages.h"

/* sluice_comm_create_host with another name ("mpi"; an immutable string). */
sluice_status_t sluice_host_comm_create(const sluice_comm_config_t* config, const sluice_host_comm_vtable_t* vtable,
                                        void* user, const char* name, sluice_comm_t** out_comm);
/* Adds messages, carried by `sized` with the user of the vtable. sized is copied. */
void sluice_host_comm_set_messages(sluice_comm_t* comm, const sluice_sized_messages_t* sized);
