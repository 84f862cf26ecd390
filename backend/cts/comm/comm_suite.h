// SPDX-License-Identifier: Apache-2.0
/* Conformance of transports: every implementation of backend/comm/comm.h passes these cases, one program per world
 * size.
 *
 * Ranks are threads of the test (local, host), or each process is one rank (mpi). A transport lists, with
 * reasons, the cases that it cannot pass; they still run, and a listed case that passes fails the test until it is
 * removed from the list. */
#pragma once

#include "backend/comm/comm.h"

typedef struct cts_exception_s {
  const char* case_name;
  const char* reason; /* NULL case_name ends the list */
} cts_exception_t;

typedef struct cts_transport_s {
  const char* name;
  /* State shared by the ranks of one group; NULL on failure. Called once per group in each process. */
  void* (*open)(int32_t world_size);
  void (*close)(void* shared);
  /* Creates one rank's communicator, on the rank's own thread. */
  sluice_status_t (*create)(void* shared, const sluice_comm_config_t* config, sluice_comm_t** out_comm);
  const cts_exception_t* cannot;
  /* Ranks are processes: this one's rank, and a communicator that outlives all cases, for barriers outside the one
   * under test. NULL: ranks are threads. */
  sluice_comm_t* meeting;
} cts_transport_t;

/* Runs every case under cmocka; returns the number of failures. Call once per process. */
int cts_comm_suite_run(const cts_transport_t* transport, int32_t world_size);
/* The same as a program: its argument is the world size, by default 2. */
int cts_comm_suite_main(const cts_transport_t* transport, int argc, char** argv);
