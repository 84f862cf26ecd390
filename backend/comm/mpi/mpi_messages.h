// SPDX-License-Identifier: Apache-2.0
/* Messages of the plugin: MPI messages on one duplicate of the communicator for all endpoints, with one tag per
 * endpoint, so that leftovers of one endpoint never reach the next. */
#pragma once

#include <mpi.h>

#include "backend/comm/sized_messages.h"

/* Part of a communicator. */
typedef struct sluice_mpi_messages_s {
  MPI_Comm comm; /* MPI_COMM_NULL until the first endpoint */
  int num_opened;
  int is_dirty; /* messages may be in flight: it is not freed, or a new communicator could get its context id and
                   receive them */
} sluice_mpi_messages_t;

extern const sluice_sized_messages_t sluice_mpi_sized_messages;

/* mpi_plugin.c. user: that of the entries. */
sluice_mpi_messages_t* sluice_mpi_messages_of(void* user, MPI_Comm* out_comm);
