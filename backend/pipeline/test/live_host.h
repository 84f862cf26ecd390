// SPDX-License-Identifier: Apache-2.0
/* A host of a pipeline in which a run of layers changes its stage while batches run, over sluice_pipeline_*,
 * sluice_migration_* and sluice_layer_move_*; and a plain loop over the same layers as the reference.
 *
 * Every stage has its own layer; further layers, the run L, are at the cut between two stages and move together. A
 * layer is y = x * w, element by element, with weight, gradient and moment. */
#pragma once

#include "sluice/migration.h"
#include "sluice/pipeline.h"

enum { LIVE_MOST_STAGES = 4, LIVE_MOST_RUN = 3, LIVE_WIDTH = 1500, LIVE_MICRO_BATCHES = 8 };

typedef struct live_layer_s {
  float weight[LIVE_WIDTH], moment[LIVE_WIDTH], grad[LIVE_WIDTH];
} live_layer_t;

/* Saved by a stage for a micro-batch: inputs of its own layer and of each of L. */
typedef struct live_stash_s {
  float own[LIVE_WIDTH], moving[LIVE_MOST_RUN][LIVE_WIDTH], y[LIVE_WIDTH], dx[LIVE_WIDTH];
  int ran; /* L */
  int64_t shape[1];
  sluice_tensor_t out, back;
} live_stash_t;

typedef struct live_stage_s {
  int32_t upper, stage, batch; /* L is at the cut between the stages upper and upper + 1 */
  int32_t run;                 /* layers of L */
  sluice_migration_t* migration;
  live_layer_t own, moving[LIVE_MOST_RUN];
  int has_moving; /* owns L between batches */
  int is_moving;  /* L moves in this batch */
  sluice_layer_move_t live;
  float held[LIVE_MICRO_BATCHES][LIVE_MOST_RUN][LIVE_WIDTH];
  int is_held[LIVE_MICRO_BATCHES];
  float incoming[LIVE_MOST_RUN][LIVE_WIDTH]; /* the sums of the stage that L leaves */
  int has_sum;                               /* the sums have arrived, or are in flight */
  live_stash_t stash[LIVE_MICRO_BATCHES];
  void (*at_callback)(void); /* or NULL */
  sluice_status_t early;     /* what sluice_migration_read_early returned, if not OK */
} live_stage_t;

/* Layers after `batches` updates. */
void live_reference(int32_t p, int32_t upper, int32_t run, int32_t batches, live_layer_t own[LIVE_MOST_STAGES],
                    live_layer_t moving[LIVE_MOST_RUN]);

/* Initialises stage s. The layers that move, a run of `run` layers called L, begin on stage `upper`. stage->migration
 * is borrowed and set before L moves. */
void live_stage_init(live_stage_t* stage, int32_t upper, int32_t run, int32_t s);
/* Callbacks of a pipeline whose user is a live_stage_t. */
const sluice_pipeline_callbacks_t* live_callbacks(void);
int live_is_at_the_cut(const live_stage_t* stage);

/* Starts L's move after an update; the same on all stages. */
sluice_status_t live_set_out(live_stage_t* stage, int to_lower, uint64_t epoch);
/* After a committed move: adds the held gradients to the received sum. */
void live_arrive(live_stage_t* stage);
/* After a failed batch: restores the state after the previous update. */
void live_forget_batch(live_stage_t* stage);
void live_update(live_stage_t* stage);
