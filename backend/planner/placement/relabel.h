/* Which of the new groups of experts goes to which rank, so that fewest bytes move. */
#ifndef SLUICE_BACKEND_PLANNER_PLACEMENT_RELABEL_H_
#define SLUICE_BACKEND_PLANNER_PLACEMENT_RELABEL_H_

#include "backend/planner/placement/placing.h"

/* Ranks exchange all their experts, those with equally many, as cheaply as possible: an assignment problem, solved
 * exactly [Kuhn 1955, Munkres 1957, by shortest augmenting paths]. Loads are the same numbers afterwards, of other
 * ranks. Errors: NO_MEMORY: nothing has changed. */
sluice_status_t sluice_relabel(sluice_placing_t* placing, sluice_allocator_t* allocator);

#endif /* SLUICE_BACKEND_PLANNER_PLACEMENT_RELABEL_H_ */
