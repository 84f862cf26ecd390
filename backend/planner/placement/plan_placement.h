// SPDX-License-Identifier: Apache-2.0
/* Plans the placement of experts. Pure: equal problems give equal placements. sluice/placement.h defines units and
 * errors.
 *
 * Swaps reduce the load of the fullest rank, starting from the current placement (swaps.c). If that misses the target,
 * a second candidate starts from scratch: experts, heaviest first, go to the least loaded rank with a free place; swaps
 * level it; its groups are assigned to ranks so that the fewest bytes move (relabel.c). Experts that need not have
 * moved return to their home rank. Up to 12 experts, an exhaustive search finds the optimum. */
#pragma once

#include "backend/base/alloc.h"
#include "sluice/placement.h"

/* problem: of this library's size, its arrays not NULL. Fills *result, whose arrays belong to the caller. Errors:
 * INVALID_ARGUMENT, NO_MEMORY: no effect. */
sluice_status_t sluice_placement_plan(const sluice_placement_problem_t* problem, sluice_allocator_t* allocator,
                                      sluice_placement_result_t* result);

/* Decides whether a move pays: sluice_planner_move_verdict of sluice/placement.h, on a struct of this library's size.
 * Errors: INVALID_ARGUMENT. */
sluice_status_t sluice_move_verdict(const sluice_planner_move_t* move, int32_t* out_verdict);
