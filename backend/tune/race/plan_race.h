// SPDX-License-Identifier: Apache-2.0
/* Races a few plans under a budget (n, restore policy, weight-gradient mode) in ordinary training steps.
 *
 * The plans run in order of their predicted time. Each runs a warm-up step and then up to k counted steps; its shortest
 * times count. A plan that is clearly slower than the best in two steps is eliminated; one step is enough if the
 * slowdown exceeds a change of the machine's speed. The answer is final: plans fill their budget, and another set of
 * plans is another race.
 *
 * Only steps of about the size of the first one count, so that changing batches do not decide the race; if no size
 * repeats, the first plan wins. If steps run but none can be counted (ranks ran passes differently, a direction is not
 * timed), the race is given up: the best of the measured plans wins, or else the first one. Layers share a race, each
 * with the number of rows that it receives: passes of another size end the race only if no passes of the right size are
 * left.
 *
 * Source: MPMoE's joint selection of (n, strategy): the model first, then ordinary steps confirm the best few. */
#pragma once

#include <stdint.h>

#include "backend/tune/race/race_timeout.h"

#define SLUICE_RACE_PLANS 4

typedef struct sluice_racing_plan_s {
  int32_t num_chunks, restore_input, restore_pre_activation, wgrad_mode;
} sluice_racing_plan_t;

typedef struct sluice_plan_race_s {
  int32_t count;
  int32_t is_settled;
  int32_t pick;                  /* the answer, or the plan that runs now */
  uint32_t alive;                /* set of plans */
  int64_t rows;                  /* size of the steps that count; 0: none so far */
  int64_t passes;                /* used by the race, both directions */
  int64_t timed;                 /* all timed passes, including those after the race and of other sizes */
  sluice_race_timeout_t timeout; /* since the last pass that advanced the race */
  int32_t elsewhere;             /* laps with passes of other sizes only */
  uint8_t saw_other;             /* a pass of another size, in this lap */
  uint8_t saw_counted;           /* a pass that counted */
  double total_ns, excess_ns;    /* of passes that counted; beyond the times of the best plan */
  double switch_ns;              /* of first passes after a switch, beyond the shortest of the same plan */
  sluice_racing_plan_t plans[SLUICE_RACE_PLANS];
  int32_t counts[SLUICE_RACE_PLANS][2]; /* by direction; the first pass is the warm-up */
  double ns_per_row[SLUICE_RACE_PLANS][2];
  double first_ns_per_row[SLUICE_RACE_PLANS][2]; /* of warm-ups, until the next pass shows what they cost */
} sluice_plan_race_t;

/* count in [1, SLUICE_RACE_PLANS]; a single plan wins at once. */
void sluice_plan_race_start(sluice_plan_race_t* race, const sluice_racing_plan_t* plans, int32_t count);
/* The plan of the next step. */
int32_t sluice_plan_race_next(sluice_plan_race_t* race);
/* Observes a pass that all ranks ran under `plan`: ns of the slowest rank, rows of the fullest. Nonzero: this pass
 * settled the race. */
int sluice_plan_race_observe(sluice_plan_race_t* race, int32_t direction, int32_t plan, int64_t rows, uint64_t ns);
/* Call for each training step of `layer` since its last forward, timed or not. Nonzero: the race timed out and is
 * settled. */
int sluice_plan_race_wait(sluice_plan_race_t* race, int32_t layer);
/* Counts the time of the first pass after a switch to `plan` beyond the plan's usual time, if that is known. */
void sluice_plan_race_count_switch(sluice_plan_race_t* race, int32_t direction, int32_t plan, int64_t rows,
                                   uint64_t ns);
/* Shortest forward plus backward in seconds at race->rows; 0: not measured. */
double sluice_plan_race_seconds(const sluice_plan_race_t* race, int32_t plan);
/* The second best plan; -1: none was measured. */
int32_t sluice_plan_race_second(const sluice_plan_race_t* race);
