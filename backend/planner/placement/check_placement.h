/* Refuses problems of placement. */
#ifndef SLUICE_BACKEND_PLANNER_PLACEMENT_CHECK_PLACEMENT_H_
#define SLUICE_BACKEND_PLANNER_PLACEMENT_CHECK_PLACEMENT_H_

#include "sluice/placement.h"

/* All but the slots. Errors: INVALID_ARGUMENT. */
sluice_status_t sluice_placement_check_problem(const sluice_placement_problem_t* problem);

/* That the slots of each rank are 0, 1, .. without holes. first: [num_ranks + 1] sums of numbers of experts before a
 * rank. taken: [num_experts], of any content. Errors: INVALID_ARGUMENT. */
sluice_status_t sluice_placement_check_slots(const sluice_placement_problem_t* problem, const int32_t* first,
                                             int32_t* taken);

#endif /* SLUICE_BACKEND_PLANNER_PLACEMENT_CHECK_PLACEMENT_H_ */
