/* Changes of places by which the fullest rank gets less to do, and those that bring experts home again. */
#ifndef SLUICE_BACKEND_PLANNER_PLACEMENT_SWAPS_H_
#define SLUICE_BACKEND_PLANNER_PLACEMENT_SWAPS_H_

#include "backend/planner/placement/placing.h"

/* Until the limit is met or nothing helps: the fullest rank swaps an expert with another rank; where no single swap
 * helps, two experts, or three ranks take turns. Among swaps that meet the limit the one with the fewest bytes, else
 * the one after which the fuller of both ranks has the least. Never worse by load. */
void sluice_swaps_level(sluice_placing_t* placing);

/* Swaps that bring at least one expert home and move fewer bytes in all, while no rank exceeds what the fullest has, or
 * the limit. */
void sluice_swaps_return(sluice_placing_t* placing);

#endif /* SLUICE_BACKEND_PLANNER_PLACEMENT_SWAPS_H_ */
