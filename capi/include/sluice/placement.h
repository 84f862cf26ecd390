/* The planner of placements: which rank owns which expert, so that the rank with the most rows has as few as possible,
 * and as few bytes as possible change their owner for it. Each rank keeps its number of experts: they change places.
 *
 * Pure: needs no context, no ranks, no clock and no random numbers; equal problems give equal placements. So ranks that
 * know the same loads plan alike without a word.
 *
 * Source: swaps of a heavy and a light expert [EPIC, SIGCOMM 2026] from the placement in force; longest processing time
 * first, with a number of places for each rank, where everything has to move. The bound is this project's.
 * docs/placement.md has the method.
 */
#ifndef SLUICE_PLACEMENT_H_
#define SLUICE_PLACEMENT_H_

#include "sluice/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Prepared by _init: target 1.05. */
typedef struct sluice_placement_problem_s {
  size_t struct_size;              /* set by sluice_placement_problem_init */
  const sluice_ext_header_t* next; /* NULL */
  const uint64_t* loads;           /* [num_experts] rows of each expert, of any number of steps; their sum <= 2^53 */
  const int32_t* expert_rank;      /* [num_experts] the placement in force, as in sluice_expert_placement_t */
  const int32_t* expert_slot;      /* [num_experts] */
  const uint64_t* expert_bytes;    /* [num_experts] of all that moves with it; their sum <= 2^53. NULL: 1 each */
  double target;                   /* good enough: so many times bound_load for the fullest rank. >= 1 */
  int32_t num_experts;             /* [1, 4096] */
  int32_t num_ranks;               /* [1, 4096] */
} sluice_placement_problem_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_placement_problem_init(sluice_placement_problem_t* out_problem,
                                                                     size_t struct_size);

/* Prepared by _init; then the caller sets the arrays, which are its own memory. */
typedef struct sluice_placement_result_s {
  size_t struct_size;              /* set by sluice_placement_result_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t* expert_rank;            /* [num_experts] the placement to put in force */
  int32_t* expert_slot;            /* [num_experts]; an expert that stays on its rank stays in its slot */
  double mean_load;                /* of a rank */
  uint64_t load_before;            /* of the fullest rank, now */
  uint64_t load;                   /* of the fullest rank, then */
  uint64_t bound_load;             /* no placement has less: the mean; the heaviest expert with the lightest others; of
                                      the k * num_ranks + 1 heaviest, k + 1 on one rank */
  uint64_t moved_bytes;            /* of experts whose rank changes */
  int32_t num_moves;               /* experts whose rank changes */
  int32_t is_optimal; /* 1: none is better, by (load, or target * bound_load where that is more; moved_bytes;
                         load). Up to 12 experts always */
} sluice_placement_result_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_placement_result_init(sluice_placement_result_t* out_result,
                                                                    size_t struct_size);

/* Plans. Nothing moves where the placement in force is good enough. Everything is borrowed for the call. Any thread,
 * with results of their own. 256 experts on 64 ranks take milliseconds. Errors: INVALID_ARGUMENT naming the field, what
 * was found and what it may be; ABI; NO_MEMORY: no result. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_placement(const sluice_placement_problem_t* problem,
                                                                        sluice_placement_result_t* inout_result);

/* Whether a move pays, for experts and for layers. */
enum {
  SLUICE_MOVE_PAYS = 0,
  SLUICE_MOVE_NO_GAIN = 1,   /* a step would not be faster */
  SLUICE_MOVE_SMALL = 2,     /* it would, by less than least_gain: loads differ by more from step to step */
  SLUICE_MOVE_TOO_SOON = 3,  /* the last move is fewer than least_steps ago */
  SLUICE_MOVE_COSTS_MORE = 4 /* than it saves within the horizon */
};

/* Prepared by _init: horizon_steps 100, least_gain 0.05. */
typedef struct sluice_planner_move_s {
  size_t struct_size;              /* set by sluice_planner_move_init */
  const sluice_ext_header_t* next; /* NULL */
  double step_seconds;             /* a step now */
  double planned_step_seconds;     /* a step after the move */
  double move_seconds;             /* what moving adds to all steps together */
  double horizon_steps;            /* so many steps, what is known now is believed to hold */
  double least_gain;               /* share of step_seconds, [0, 1) */
  int64_t steps_since_move;        /* < 0: nothing has moved yet */
  int64_t least_steps;             /* between two moves */
} sluice_planner_move_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_move_init(sluice_planner_move_t* out_move, size_t struct_size);

/* SLUICE_MOVE_PAYS where (step_seconds - planned_step_seconds) * horizon_steps > move_seconds, the gain is at least
 * least_gain of a step, and least_steps have passed; else the first reason of the list above that holds.
 * out_verdict: SLUICE_MOVE_*. Pure; any thread. Errors: INVALID_ARGUMENT (a time or count that is negative or not
 * finite: named), ABI. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_move_verdict(const sluice_planner_move_t* move,
                                                                           int32_t* out_verdict);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PLACEMENT_H_ */
