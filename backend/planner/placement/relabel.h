// SPDX-License-Identifier: Apache-2.0
/* Assigns the new groups of experts to ranks so that the fewest bytes move. */
#pragma once

#include "backend/planner/placement/placing.h"

/* Ranks with the same number of experts exchange all their experts at the least cost: an assignment problem, solved
 * exactly [Kuhn 1955, Munkres 1957, by shortest augmenting paths]. The loads remain the same numbers, on other ranks.
 * Errors: NO_MEMORY: nothing has changed. */
sluice_status_t sluice_relabel(sluice_placing_t* placing, sluice_allocator_t* allocator);
