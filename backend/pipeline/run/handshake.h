// SPDX-License-Identifier: Apache-2.0
/* The handshake of all ranks of a pipeline before its first batch. Private to backend/pipeline/run. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/pipeline/run/run.h"

typedef struct sluice_stage_handshake_s {
  sluice_pipeline_spec_t spec; /* without num_micro_batches; in_flight and held are 0 if open */
  int32_t num_ranks;
  int32_t num_replicas;
  int32_t rank, stage, replica; /* of this rank */
  int32_t* rank_of;             /* [p][num_replicas] */
  int32_t* replica_of;          /* [num_ranks] */
  int32_t* stage_of;            /* [num_ranks] */
} sluice_stage_handshake_t;

/* Collective over comm (NULL: one rank), with the same terms on all ranks. out_agreed: release with
 * sluice_stage_handshake_free. mine as in sluice_pipeline_open. */
sluice_status_t sluice_stage_shake_hands(const sluice_pipeline_terms_t* terms, sluice_status_t mine,
                                         sluice_comm_t* comm, sluice_stage_handshake_t* out_agreed);
void sluice_stage_handshake_free(sluice_stage_handshake_t* agreed);
