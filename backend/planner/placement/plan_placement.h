/* Plans where experts live. Pure: equal problems give equal placements. Units and errors are those of
 * sluice/placement.h.
 *
 * From the placement in force, swaps level the fullest rank (swaps.h). Where that does not reach the target, a second
 * candidate is made from nothing: heaviest first onto the rank with the least, as long as it has a place, then
 * levelled, its groups named so that fewest bytes move (relabel.h). What need not have moved returns. Up to 12 experts
 * the best of all is searched (exact.h). */
#ifndef SLUICE_BACKEND_PLANNER_PLACEMENT_PLAN_PLACEMENT_H_
#define SLUICE_BACKEND_PLANNER_PLACEMENT_PLAN_PLACEMENT_H_

#include "backend/base/alloc.h"
#include "sluice/placement.h"

/* problem: of this library's size, its arrays not NULL. Fills *result, whose arrays are the caller's.
 * Errors: INVALID_ARGUMENT, NO_MEMORY: no effect. */
sluice_status_t sluice_placement_plan(const sluice_placement_problem_t* problem, sluice_allocator_t* allocator,
                                      sluice_placement_result_t* result);

#endif /* SLUICE_BACKEND_PLANNER_PLACEMENT_PLAN_PLACEMENT_H_ */
