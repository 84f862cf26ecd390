// SPDX-License-Identifier: Apache-2.0
/* The executor of stage programs: one stage of a pipeline on one rank, with the same runner as the simulator, over
 * messages (comm/messages.h) and the host's callbacks (sluice/pipeline.h).
 *
 * The thread in sluice_pipeline_batch runs all callbacks. Messages progress in the background: the executor posts what
 * is ready before each callback, and takes completions after it. */
#pragma once

#include "backend/pipeline/spec.h"
#include "sluice/pipeline.h"

/* The config of one rank, after validation. Pointers are borrowed for the call. */
typedef struct sluice_pipeline_terms_s {
  const char* partition; /* or NULL */
  int32_t policy;        /* SLUICE_POLICY_* of policy.h */
  int32_t num_virtual;
  int32_t placement;
  int32_t separate_wgrad;
  int32_t receives_ahead;
  int32_t reduces; /* whether the host has the callback */
  int32_t in_flight;
  int32_t held;
  int32_t num_replicas;
  int32_t replica; /* -1: rank / p */
  int32_t stage;   /* -1: rank mod p */
  const int32_t* in_flight_of;
  uint64_t byte_limit;
  const uint64_t* activation_bytes;
  const uint64_t* held_bytes;
  const int32_t* has_experts;
} sluice_pipeline_terms_t;

/* mine: this rank's earlier status; a failure is told to the other ranks and returned here, and terms and callbacks are
 * ignored. Errors: those of sluice_pipeline_create. */
sluice_status_t sluice_pipeline_open(const sluice_pipeline_terms_t* terms, sluice_status_t mine, sluice_comm_t* comm,
                                     const sluice_pipeline_callbacks_t* callbacks, void* user,
                                     sluice_pipeline_t** out_pipeline);
void sluice_pipeline_close(sluice_pipeline_t* pipeline); /* accepts NULL */

/* mine: as above; the batch is counted even then, so that ranks stay in step. Errors: those of
 * sluice_pipeline_run_batch. */
sluice_status_t sluice_pipeline_batch(sluice_pipeline_t* pipeline, sluice_status_t mine, int32_t num_micro_batches,
                                      int32_t forward_only);

void sluice_pipeline_stop(sluice_pipeline_t* pipeline); /* sluice_pipeline_abort */

/* Implements sluice_pipeline_keep and the functions after it. */
sluice_status_t sluice_pipeline_keep_tensors(sluice_pipeline_t* pipeline, const sluice_stage_tensors_t* received,
                                             void** out_kept);
void sluice_pipeline_release_kept(void* kept); /* any thread; accepts NULL */
sluice_status_t sluice_pipeline_give_note(sluice_pipeline_t* pipeline, const double* numbers, int32_t count);
sluice_status_t sluice_pipeline_read_note(sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers,
                                          int32_t capacity, int32_t* out_count);
sluice_status_t sluice_pipeline_read_stats(sluice_pipeline_t* pipeline, sluice_pipeline_stats_t* out_stats);
sluice_status_t sluice_pipeline_read_events(sluice_pipeline_t* pipeline, sluice_stage_event_t* out_events,
                                            int64_t capacity, int64_t* out_count);
sluice_status_t sluice_pipeline_write_batch(sluice_pipeline_t* pipeline, int32_t which, char* text,
                                            uint64_t* inout_bytes);
