// SPDX-License-Identifier: Apache-2.0
/* Decides whether a move pays: sluice_planner_move_verdict of sluice/placement.h, on a struct of this library's
 * size. */
#pragma once

#include "sluice/placement.h"

/* Errors: INVALID_ARGUMENT. */
sluice_status_t sluice_move_verdict(const sluice_planner_move_t* move, int32_t* out_verdict);
