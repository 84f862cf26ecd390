/* The race of a few plans under a budget (n, restore policy, weight-gradient mode), as ordinary steps.
 *
 * The plans come in order of their predicted time. Each in turn runs a warm-up step and then up to k counted ones, and
 * its shortest times count; one that is clearly slower than the best in two of them is out, or in one where no flip of
 * the machine's speed explains that. The answer stands: plans
 * fill their budget, and another set of them is another race.
 *
 * Only steps of about the size of the first count, so that changing batches do not decide it; where sizes never repeat,
 * the first plan wins. Where steps go on and none of them can be counted (ranks ran passes differently, a direction is
 * not timed), the race is given up: the best of what ran, else the first plan. Layers share a race, each with the rows
 * that it is routed: those of another size end it only where none of the right one is left.
 *
 * Source: MPMoE's joint selection of (n, strategy), with the model first and the
 * best few confirmed by ordinary steps.
 */
#ifndef SLUICE_BACKEND_TUNE_RACE_PLAN_RACE_H_
#define SLUICE_BACKEND_TUNE_RACE_PLAN_RACE_H_

#include <stdint.h>

#include "backend/tune/race/race_timeout.h"

#define SLUICE_RACE_PLANS 4

typedef struct sluice_racing_plan_s {
  int32_t num_chunks, restore_input, restore_pre_activation, wgrad_mode;
} sluice_racing_plan_t;

typedef struct sluice_plan_race_s {
  int32_t count;
  int32_t is_settled;
  int32_t pick;                  /* the answer, or what runs now */
  uint32_t alive;                /* set of plans */
  int64_t rows;                  /* size of the steps that count; 0: none yet */
  int64_t passes;                /* that the race took, both directions */
  int64_t timed;                 /* all that were seen, also behind the race and of other sizes */
  sluice_race_timeout_t timeout; /* since a pass last brought the race forward */
  int32_t elsewhere;             /* laps with passes of other sizes alone */
  uint8_t saw_other;             /* such a pass, in this lap */
  uint8_t saw_counted;           /* one that counted */
  double total_ns, excess_ns;    /* of passes that counted; beyond those of the best */
  double switch_ns;              /* of first passes after a switch, beyond the shortest of the same plan */
  sluice_racing_plan_t plans[SLUICE_RACE_PLANS];
  int32_t counts[SLUICE_RACE_PLANS][2]; /* by direction; the first is the warm-up */
  double ns_per_row[SLUICE_RACE_PLANS][2];
  double first_ns_per_row[SLUICE_RACE_PLANS][2]; /* of warm-ups, until the next pass tells what they cost */
} sluice_plan_race_t;

/* count in [1, SLUICE_RACE_PLANS]; a single plan has won. */
void sluice_plan_race_start(sluice_plan_race_t* race, const sluice_racing_plan_t* plans, int32_t count);
/* The plan of the next step. */
int32_t sluice_plan_race_next(sluice_plan_race_t* race);
/* A pass that all ranks ran under `plan`: ns of the slowest, rows of the fullest. Nonzero: it settled the race. */
int sluice_plan_race_observe(sluice_plan_race_t* race, int32_t direction, int32_t plan, int64_t rows, uint64_t ns);
/* A training step of `layer` has run since its last forward, timed or not. Nonzero: that settled the race, since none
 * brings it forward for long. */
int sluice_plan_race_wait(sluice_plan_race_t* race, int32_t layer);
/* A first pass after a switch to `plan`: what it took beyond the plan's usual time is counted where that is known. */
void sluice_plan_race_count_switch(sluice_plan_race_t* race, int32_t direction, int32_t plan, int64_t rows,
                                   uint64_t ns);
/* Shortest forward and backward in seconds at race->rows; 0: not measured. */
double sluice_plan_race_seconds(const sluice_plan_race_t* race, int32_t plan);
/* The second best; -1: none was measured. */
int32_t sluice_plan_race_second(const sluice_plan_race_t* race);

#endif /* SLUICE_BACKEND_TUNE_RACE_PLAN_RACE_H_ */
