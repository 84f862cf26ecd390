// SPDX-License-Identifier: Apache-2.0
/* Swaps that reduce the load of the fullest rank, and swaps that return experts to their home rank. */
#pragma once

#include "backend/planner/placement/placing.h"

/* Levels the loads until the limit is met or no swap helps: the fullest rank swaps an expert with another rank; if no
 * single swap helps, two experts for two, or a rotation over three ranks. Of the swaps that meet the limit it takes the
 * one with the fewest bytes, else the one that leaves the least load on the fuller of both ranks. Never increases the
 * load. */
void sluice_swaps_level(sluice_placing_t* placing);

/* Returns experts to their home rank with swaps that move fewer bytes in total, without a rank above the fullest load
 * or the limit. */
void sluice_swaps_return(sluice_placing_t* placing);
