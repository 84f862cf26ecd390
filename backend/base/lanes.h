// SPDX-License-Identifier: Apache-2.0
/* The number of lanes; their numbers are public (SLUICE_LANE_* in sluice/context.h). */
#pragma once

#define SLUICE_NUM_LANES 4
