// SPDX-License-Identifier: Apache-2.0
/* Rejects invalid placement problems. */
#pragma once

#include "sluice/placement.h"

/* Checks everything except the slots. Errors: INVALID_ARGUMENT. */
sluice_status_t sluice_placement_check_problem(const sluice_placement_problem_t* problem);

/* Checks that the slots of each rank are 0, 1, .. without gaps. first: [num_ranks + 1] number of experts on the ranks
 * before. taken: [num_experts] scratch. Errors: INVALID_ARGUMENT. */
sluice_status_t sluice_placement_check_slots(const sluice_placement_problem_t* problem, const int32_t* first,
                                             int32_t* taken);
