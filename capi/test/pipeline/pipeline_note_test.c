// SPDX-License-Identifier: Apache-2.0
/* Notes: each rank sends numbers of its host with the end of a batch, so that all ranks have the numbers of all. A rank
 * that fails sends none. */
#include "capi/test/pipeline/pipeline_world.h"

/* The numbers of each rank for the current batch. Callbacks write them. */
static double notes[PW_MAX_RANKS][PW_MAX_RANKS + 1];
static int32_t next_batch[PW_MAX_RANKS];

static int32_t count_of(int32_t rank) { return rank == 1 ? 0 : rank + 1; }

/* Checks the notes of the previous batch, which succeeded. */
static void check_notes(pw_rank_t* rank, int32_t batch) {
  const int32_t num_ranks = rank->world->num_stages * rank->world->num_replicas;
  for (int32_t r = 0; r < num_ranks; ++r) {
    double found[PW_MAX_RANKS + 1] = {-1};
    int32_t count = -1;
    if (sluice_pipeline_get_note(rank->pipeline, r, found, PW_MAX_RANKS + 1, &count) != SLUICE_OK ||
        count != count_of(r)) {
      pw_wrong(rank, "batch %d: the note of rank %d has %d numbers", batch, r, count);
      continue;
    }
    for (int32_t i = 0; i < count; ++i) {
      const double wanted = 1000 * (batch + 1) + 100 * r + i; /* as the last forward of the batch wrote it */
      if (found[i] != wanted) pw_wrong(rank, "batch %d: number %d of rank %d is %g", batch, i, r, found[i]);
    }
  }
}

static void between(pw_rank_t* rank) {
  int32_t count = -1;
  const int32_t batch = next_batch[rank->rank]++;
  if (batch == 0) {
    if (sluice_pipeline_get_note(rank->pipeline, 0, NULL, 0, &count) != SLUICE_E_STATE) pw_wrong(rank, "no batch yet");
    if (sluice_pipeline_set_note(rank->pipeline, notes[rank->rank], count_of(rank->rank)) != SLUICE_OK) {
      pw_wrong(rank, "a note was refused");
    }
  } else if (rank->ended[batch - 1] == SLUICE_OK) {
    check_notes(rank, batch - 1);
  } else if (sluice_pipeline_get_note(rank->pipeline, 0, NULL, 0, &count) != SLUICE_E_STATE) {
    pw_wrong(rank, "a batch that failed has notes");
  }
}

static void after(pw_rank_t* rank) {
  check_notes(rank, rank->world->num_batches - 1);
  int32_t count = 0;
  const int32_t num_ranks = rank->world->num_stages * rank->world->num_replicas;
  if (sluice_pipeline_get_note(rank->pipeline, num_ranks, NULL, 0, &count) != SLUICE_E_INVALID_ARGUMENT) {
    pw_wrong(rank, "a rank that is none has a note");
  }
  if (sluice_pipeline_set_note(rank->pipeline, notes[0], SLUICE_PIPELINE_MAX_NOTE + 1) != SLUICE_E_INVALID_ARGUMENT) {
    pw_wrong(rank, "a note may be longer than it may");
  }
}

static sluice_status_t in_call(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                               sluice_host_failure_t* out_failure) {
  (void)out_failure;
  for (int32_t i = 0; i < count_of(rank->rank); ++i)
    notes[rank->rank][i] = 1000 * (rank->batch + 1) + 100 * rank->rank + i;
  int32_t count = 0;
  if (sluice_pipeline_get_note(rank->pipeline, 0, NULL, 0, &count) != SLUICE_E_BUSY) pw_wrong(rank, "asked in a batch");
  return rank->batch == 2 && rank->rank == 1 && call == PW_BACKWARD && op->micro_batch == 1 ? SLUICE_E_EXTERNAL
                                                                                            : SLUICE_OK;
}

static void try_one(const char* transport, int32_t p, int32_t replicas) {
  pw_world_t* world = pw_world_new(transport, p);
  world->num_replicas = replicas;
  world->config.num_replicas = replicas;
  world->between = between;
  world->after = after;
  world->in_call = in_call;
  memset(next_batch, 0, sizeof next_batch);
  for (int32_t m = 1; m <= 5; ++m) pw_world_add(world, m, m == 4);
  pw_world_run(world);
  assert_nothing_wrong(world);
  for (int32_t r = 0; r < p * replicas; ++r) assert_int_equal(world->ranks[r].ended[4], SLUICE_OK);
  if (p > 1) assert_int_equal(world->ranks[1].ended[2], SLUICE_E_EXTERNAL);
  pw_world_free(world);
}

TEST(Note_OfEachRank_IsKnownToAllAfterABatch) {
  try_one("none", 1, 1);
  for (int32_t p = 2; p <= 4; ++p) {
    try_one("local", p, 1);
    try_one("tcp", p, 1);
  }
  try_one("local", 2, 2);
}
