// SPDX-License-Identifier: Apache-2.0
/* A lower bound of the fullest rank's load over all placements. */
#pragma once

#include "backend/planner/placement/placing.h"

/* Returns the maximum of: the mean, rounded up; and for each k the k + 1 lightest of the k * W + 1 heaviest experts,
 * since one of W ranks has k + 1 of them, plus the lightest other experts that fill its places. k = 0 is the heaviest
 * expert. Ranks without experts are not counted. Reads loads, by_load and capacity. */
uint64_t sluice_placing_bound(const sluice_placing_problem_t* problem);
