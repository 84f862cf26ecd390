// SPDX-License-Identifier: Apache-2.0
/* The host's calls for batch metadata: sets the numbers of this rank, and returns those that a rank has sent. */
#include "backend/base/check.h"
#include "backend/pipeline/run/state.h"

sluice_status_t sluice_pipeline_give_note(sluice_pipeline_t* pipeline, const double* numbers, int32_t count) {
  SLUICE_TRY(sluice_stage_enter(pipeline));
  pipeline->note = numbers;
  pipeline->note_count = count;
  atomic_flag_clear(&pipeline->is_busy);
  return SLUICE_OK;
}

static sluice_status_t read_note(const sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers, int32_t capacity,
                                 int32_t* out_count) {
  const int32_t num_ranks = pipeline->agreed.num_ranks;
  SLUICE_TRY(SLUICE_REQUIRE(rank >= 0 && rank < num_ranks, "sluice_pipeline_get_note: rank is %d; give 0 to %d", rank,
                            num_ranks - 1));
  if (!pipeline->has_told) {
    return SLUICE_FAIL(SLUICE_E_STATE, "sluice_pipeline_get_note: call it after a batch that succeeded");
  }
  const sluice_batch_metadata_t* note = &pipeline->peers[rank].notes[pipeline->number % 2];
  *out_count = note->count;
  for (int32_t i = 0; i < note->count && i < capacity; ++i) out_numbers[i] = note->numbers[i];
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_read_note(sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers,
                                          int32_t capacity, int32_t* out_count) {
  *out_count = 0;
  SLUICE_TRY(sluice_stage_enter(pipeline));
  const sluice_status_t status = read_note(pipeline, rank, out_numbers, capacity, out_count);
  atomic_flag_clear(&pipeline->is_busy);
  return status;
}
