// SPDX-License-Identifier: Apache-2.0
/* Rejects invalid problems before anything is computed. */
#pragma once

#include "backend/base/status.h"
#include "backend/planner/stages/problem/model.h"

/* Returns INVALID_ARGUMENT with the field, its value and the valid range. All sums of bytes of a valid problem stay
 * below 2^53, so that they are exact as doubles and no sum wraps. */
sluice_status_t sluice_stages_check(const sluice_stages_problem_t* problem);
