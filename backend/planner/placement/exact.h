// SPDX-License-Identifier: Apache-2.0
/* Finds the best placement by exhaustive search. */
#pragma once

#include "backend/planner/placement/placing.h"

enum { SLUICE_PLACING_EXACT_EXPERTS = 12 };

/* Makes inout_best the best placement of at most SLUICE_PLACING_EXACT_EXPERTS experts, by branch and bound from its
 * current value. Ranks without experts are skipped. */
void sluice_placing_exact(sluice_placing_t* inout_best);
