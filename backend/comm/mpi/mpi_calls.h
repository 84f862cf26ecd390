// SPDX-License-Identifier: Apache-2.0
/* Shared by the files of the plugin: the clock, and the report of a failed MPI call. */
#pragma once

#include <mpi.h>
#include <stdio.h>
#include <time.h>

#include "sluice/comm.h"

#define SLUICE_MPI_CANCEL_NS UINT64_C(200000000) /* for receives that were cancelled */

static inline uint64_t sluice_mpi_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* code: an MPI error code. peer: -1 if no rank is to blame. Returns EXTERNAL. */
static inline sluice_status_t sluice_mpi_fail(sluice_host_failure_t* out_failure, const char* function, int code,
                                              int peer) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  (void)MPI_Error_string(code, text, &length);
  out_failure->peer = peer;
  out_failure->native_code = code;
  snprintf(out_failure->message, sizeof out_failure->message, "%s: %s", function, text);
  return SLUICE_E_EXTERNAL;
}
