// SPDX-License-Identifier: Apache-2.0
/* The planner of placements assigns experts to ranks, so that the rank with the most rows has as few as possible, and
 * as few bytes as possible move for it. Each rank keeps its number of experts: experts swap places.
 *
 * Pure: it needs no context, no ranks, no clock and no random numbers, and equal problems give equal placements. Ranks
 * that know the same loads therefore compute the same plan without communication.
 *
 * Source: swaps of a heavy and a light expert [EPIC, SIGCOMM 2026] from the placement in force; longest processing time
 * first, with a number of places for each rank, for problems in which everything has to move. The bound is this
 * project's. docs/placement.md describes the method. */
#ifndef SLUICE_PLACEMENT_H_
#define SLUICE_PLACEMENT_H_

#include "sluice/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* _init sets target 1.05. */
typedef struct sluice_placement_problem_s {
  size_t struct_size;              /* set by sluice_placement_problem_init */
  const sluice_ext_header_t* next; /* NULL */
  const uint64_t* loads;           /* [num_experts] rows of each expert, of any number of steps; their sum <= 2^53 */
  const int32_t* expert_rank;      /* [num_experts] the placement in force, as in sluice_expert_placement_t */
  const int32_t* expert_slot;      /* [num_experts] */
  const uint64_t* expert_bytes;    /* [num_experts] bytes that move with each expert; their sum <= 2^53. NULL: 1 each */
  double target;                   /* a placement is good enough if the rank with the most rows has at most target *
                                      bound_load. >= 1 */
  int32_t num_experts;             /* [1, 4096] */
  int32_t num_ranks;               /* [1, 4096] */
} sluice_placement_problem_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_placement_problem_init(sluice_placement_problem_t* out_problem,
                                                                     size_t struct_size);

/* After _init the caller sets the arrays, which are its own memory. */
typedef struct sluice_placement_result_s {
  size_t struct_size;              /* set by sluice_placement_result_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t* expert_rank;            /* [num_experts] the placement to put in force */
  int32_t* expert_slot;            /* [num_experts]; an expert that stays on its rank stays in its slot */
  double mean_load;                /* mean rows of a rank */
  uint64_t load_before;            /* most rows of a rank, under the placement in force */
  uint64_t load;                   /* most rows of a rank, under the new placement */
  uint64_t bound_load;             /* lower bound of load for every placement: the mean; the heaviest expert with the
                                      lightest others; of the k * num_ranks + 1 heaviest, k + 1 on one rank */
  uint64_t moved_bytes;            /* bytes of experts whose rank changes */
  int32_t num_moves;               /* experts whose rank changes */
  int32_t is_optimal; /* 1: no placement is better, compared by (load, or target * bound_load if that is larger;
                         moved_bytes; load). Always 1 up to 12 experts */
} sluice_placement_result_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_placement_result_init(sluice_placement_result_t* out_result,
                                                                    size_t struct_size);

/* Computes a placement. Nothing moves if the placement in force is good enough. Everything is borrowed for the call.
 * Any thread, with results of their own. 256 experts on 64 ranks take milliseconds. Errors: INVALID_ARGUMENT (names the
 * field, what was found and what it may be); ABI; NO_MEMORY: no result. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_placement(const sluice_placement_problem_t* problem,
                                                                        sluice_placement_result_t* inout_result);

/* The verdict on whether a move of experts or layers pays. */
enum {
  SLUICE_MOVE_PAYS = 0,
  SLUICE_MOVE_NO_GAIN = 1,   /* a step would not be faster */
  SLUICE_MOVE_SMALL = 2,     /* a step would be faster, but by less than least_gain: loads differ by more from step to
                                step */
  SLUICE_MOVE_TOO_SOON = 3,  /* the last move is fewer than least_steps ago */
  SLUICE_MOVE_COSTS_MORE = 4 /* the move costs more than it saves within the horizon */
};

/* _init sets horizon_steps 100, least_gain 0.05. */
typedef struct sluice_planner_move_s {
  size_t struct_size;              /* set by sluice_planner_move_init */
  const sluice_ext_header_t* next; /* NULL */
  double step_seconds;             /* time of a step now */
  double planned_step_seconds;     /* time of a step after the move */
  double move_seconds;             /* time that the move adds, over all steps */
  double horizon_steps;            /* number of steps for which the current loads are assumed to hold */
  double least_gain;               /* fraction of step_seconds, [0, 1) */
  int64_t steps_since_move;        /* < 0: nothing has moved yet */
  int64_t least_steps;             /* minimum number of steps between two moves */
} sluice_planner_move_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_move_init(sluice_planner_move_t* out_move, size_t struct_size);

/* Decides whether a move pays. out_verdict: SLUICE_MOVE_*. It is SLUICE_MOVE_PAYS if (step_seconds -
 * planned_step_seconds) * horizon_steps > move_seconds, the gain is at least least_gain of a step, and least_steps have
 * passed; else the first reason of the list above that holds. Pure; any thread. Errors: INVALID_ARGUMENT (names a time
 * or count that is negative or not finite), ABI. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_move_verdict(const sluice_planner_move_t* move,
                                                                           int32_t* out_verdict);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PLACEMENT_H_ */
