// SPDX-License-Identifier: Apache-2.0
/* What the ranks of a step tell each other beside sums. Private to backend/optim. */
#ifndef SLUICE_BACKEND_OPTIM_BUCKETED_HANDSHAKE_H_
#define SLUICE_BACKEND_OPTIM_BUCKETED_HANDSHAKE_H_

#include "backend/optim/bucketed/request.h"
#include "backend/optim/lines.h"

/* What all ranks know after they have agreed. */
typedef struct sluice_agreed_s {
  float largest;       /* |gradient| over all ranks; infinity: one is infinite or no number */
  int64_t proposal;    /* k, of rank 0 */
  uint64_t latency_ns; /* that the exchange took */
} sluice_agreed_t;

/* Collective over step->comm. mine: of this rank; lines: NULL where step->refused. Errors: as sluice_bucketed_step. */
sluice_status_t sluice_step_handshake(const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                                      const sluice_agreed_t* mine, sluice_agreed_t* out_agreed);

/* Where no gradient is larger, no sum over the ranks of a line leaves f32. */
float sluice_largest_safe_gradient(const sluice_lines_t* lines);

/* What has been found in sums. */
typedef struct sluice_found_s {
  double squares; /* of this rank's share of lines that not all ranks have */
  float largest;  /* over all of this rank's lines */
  int32_t reserved;
} sluice_found_t;

/* Collective over comm (NULL: one rank): squares are added in rank order, the largest is the largest of all. */
sluice_status_t sluice_handshake_on_sums(sluice_comm_t* comm, const sluice_found_t* mine, sluice_found_t* out_found);

/* What a rank makes or opens, and the steps that are whole in it. */
typedef struct sluice_files_s {
  int32_t makes;
  int64_t step, other_step; /* SLUICE_NO_STEP: none */
} sluice_files_t;

/* Collective over comm (NULL: one rank), when files are made or opened with `status` here: the last step that all have.
 * Errors: `status`; PEER_REFUSED where another rank had one (names it); MISMATCH where one makes a file and another
 * opens one, or where no step is in all of them; of the exchange. */
sluice_status_t sluice_handshake_on_files(sluice_comm_t* comm, sluice_status_t status, const sluice_files_t* mine,
                                          int64_t* out_step);

/* Collective over comm (NULL: one rank): how the step ended on this rank. Errors: `ran`; PEER_REFUSED where it failed
 * on another one (names it); of the exchange. */
sluice_status_t sluice_handshake_on_end(sluice_comm_t* comm, sluice_status_t ran);

#endif /* SLUICE_BACKEND_OPTIM_BUCKETED_HANDSHAKE_H_ */
