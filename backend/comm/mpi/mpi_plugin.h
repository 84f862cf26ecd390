// SPDX-License-Identifier: Apache-2.0
/* The interface of libsluice_mpi.so. It shares no symbol with libsluice: only these functions and the callbacks that
 * they return. */
#pragma once

#include "backend/comm/sized_messages.h"
#include "sluice/comm.h"

/* Increased with every change of this header; the loader refuses another version. */
enum { SLUICE_MPI_PLUGIN_VERSION = 2 };

typedef struct sluice_mpi_plugin_s {
  sluice_host_comm_vtable_t vtable;
  void* user; /* released by vtable.destroy */
  int32_t rank;
  int32_t world_size;
  sluice_sized_messages_t messages; /* with the same user */
} sluice_mpi_plugin_t;

typedef int32_t (*sluice_mpi_plugin_version_fn_t)(void);
/* Collective over the communicator. mpi_comm_f: a Fortran handle, or negative for MPI_COMM_WORLD. max_message_bytes:
 * longer blocks are sent as several messages; 0 = 1 GiB. Errors: UNSUPPORTED, EXTERNAL, NO_MEMORY; out_failure says
 * why. */
typedef sluice_status_t (*sluice_mpi_plugin_open_fn_t)(int64_t mpi_comm_f, uint64_t max_message_bytes,
                                                       sluice_mpi_plugin_t* out_plugin,
                                                       sluice_host_failure_t* out_failure);

SLUICE_EXPORT int32_t sluice_mpi_plugin_version(void);
SLUICE_API sluice_status_t sluice_mpi_plugin_open(int64_t mpi_comm_f, uint64_t max_message_bytes,
                                                  sluice_mpi_plugin_t* out_plugin, sluice_host_failure_t* out_failure);
