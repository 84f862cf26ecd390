// SPDX-License-Identifier: Apache-2.0
/* The arguments of a step in buckets, and the exchanges between its ranks other than sums. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/optim/adam_step.h"
#include "backend/optim/file/state_file.h"
#include "backend/optim/lines.h"

typedef struct sluice_bucketed_step_s {
  sluice_adam_step_t adam;
  sluice_comm_t* comm; /* all ranks that step together; NULL: one rank */
  sluice_comm_t* const*
      comms; /* [adam.num_groups], over which the gradients of each group are summed: comm, or some of its ranks */
  sluice_state_file_t* file; /* contains masters and moments, at the step before; NULL: they are in tensors */
  int64_t bucket;            /* elements */
  int64_t chunk;             /* k; 0: chosen by measurements */
  sluice_status_t refused; /* an earlier error of this rank, reported to the other ranks; its record is this thread's */
} sluice_bucketed_step_t;

/* What all ranks know after the handshake. */
typedef struct sluice_agreed_s {
  float largest;       /* |gradient| over all ranks; infinity if one is infinite or NaN */
  int64_t proposal;    /* the k of rank 0 */
  uint64_t latency_ns; /* duration of the exchange */
} sluice_agreed_t;

/* Collective over step->comm. mine: the values of this rank; lines: NULL if step->refused. Errors: as
 * sluice_bucketed_step. */
sluice_status_t sluice_step_handshake(const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                                      const sluice_agreed_t* mine, sluice_agreed_t* out_agreed);

/* Returns a bound on |gradient| under which no sum over the ranks of a line overflows f32. */
float sluice_largest_safe_gradient(const sluice_lines_t* lines);

/* The result of scanning sums. */
typedef struct sluice_found_s {
  double squares; /* this rank's share, for lines that not all ranks have */
  float largest;  /* over all of this rank's lines */
  int32_t reserved;
} sluice_found_t;

/* Collective over comm (NULL: one rank). Adds squares in rank order and takes the maximum of `largest`. */
sluice_status_t sluice_handshake_on_sums(sluice_comm_t* comm, const sluice_found_t* mine, sluice_found_t* out_found);

/* The file that a rank creates or opens, and its whole steps. */
typedef struct sluice_files_s {
  int32_t makes;
  int64_t step, other_step; /* SLUICE_NO_STEP: none */
} sluice_files_t;

/* Collective over comm (NULL: one rank), after files were created or opened with `status` on this rank. out_step: the
 * last step that all files have. Errors: `status`; PEER_REFUSED if it failed on another rank (names it); MISMATCH if
 * one rank creates a file and another opens one, or if no step is in all files; errors of the exchange. */
sluice_status_t sluice_handshake_on_files(sluice_comm_t* comm, sluice_status_t status, const sluice_files_t* mine,
                                          int64_t* out_step);

/* Collective over comm (NULL: one rank). ran: how the step ended on this rank. Errors: `ran`; PEER_REFUSED if it failed
 * on another rank (names it); errors of the exchange. */
sluice_status_t sluice_handshake_on_end(sluice_comm_t* comm, sluice_status_t ran);
