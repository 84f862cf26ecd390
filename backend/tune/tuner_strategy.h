// SPDX-License-Identifier: Apache-2.0
/* Joint choice of n and one of S1 to S4 if buffers are reused without a budget: one search for n per strategy, and at
 * each size of a batch a comparison of their answers [MPMoE Algorithm 1 and the paragraph after it]. Private to
 * backend/tune.
 *
 * The comparison runs in training steps: each answer runs a warm-up step and a few counted steps in a row, close ones
 * more often, and the shortest step decides. Mode MODEL compares predictions instead; with a machine, ADAPTIVE excludes
 * strategies whose best prediction is far from the best of all. */
#pragma once

#include "backend/tune/tuner_state.h"

#define SLUICE_JOINT_STRATEGIES 4

/* The steps of one strategy at one size. */
typedef struct sluice_joint_step_s {
  float forward_ns_per_row; /* of a step whose backward has not run yet; 0: none */
  float best_ns_per_row;    /* of the counted steps */
  uint8_t pick;             /* candidate that the steps ran */
  uint8_t count;            /* steps, including the warm-up */
} sluice_joint_step_t;

struct sluice_tuner_strategy_s {
  int32_t count;
  sluice_tuner_table_t* tables[SLUICE_JOINT_STRATEGIES]; /* one for each strategy that the layer can have */
  uint8_t tried[SLUICE_SEARCH_BUCKETS];                  /* strategies worth a try, one bit each; 0: not computed yet */
  uint8_t is_through[SLUICE_SEARCH_BUCKETS];             /* whether the comparison is complete */
  uint8_t told[SLUICE_SEARCH_BUCKETS];                   /* 1 + the strategy of the last decision; 0: none */
  sluice_joint_step_t steps[SLUICE_SEARCH_BUCKETS][SLUICE_JOINT_STRATEGIES];
};

/* Whether the layer chooses strategies. */
int sluice_tuner_is_joint(const sluice_moe_t* moe);
/* Whether the config of a layer allows a strategy, an index into sluice_restore_sets. */
int sluice_tuner_allows(const sluice_moe_t* moe, int32_t restore_set);

/* The table of the strategy that the next pass of `rows` received rows runs; 0 rows: not known yet. *out_pick is a
 * candidate of its search. out_why: SLUICE_WHY_*. */
sluice_tuner_table_t* sluice_tuner_strategy_next(sluice_tuner_strategy_t* joint, int64_t rows, int32_t* out_pick,
                                                 int32_t* out_why);
/* The table that a pass of that size would use next; changes nothing. NULL: the size is unknown. */
const sluice_tuner_table_t* sluice_tuner_strategy_peek(const sluice_tuner_strategy_t* joint, int64_t rows,
                                                       int32_t* out_pick);
/* The table of a strategy; NULL if there is none. */
sluice_tuner_table_t* sluice_tuner_strategy_table(const sluice_tuner_strategy_t* joint, int32_t restore_set);
/* Observes a pass that all ranks ran with the same choice. */
void sluice_tuner_strategy_observe(sluice_tuner_strategy_t* joint, int32_t restore_set, int32_t direction, int32_t pick,
                                   int64_t rows, uint64_t ns);
