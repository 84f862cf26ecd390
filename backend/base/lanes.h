// SPDX-License-Identifier: Apache-2.0
/* The number of lanes; their numbers are public (SLUICE_LANE_* in sluice/context.h). */
#ifndef SLUICE_BACKEND_BASE_LANES_H_
#define SLUICE_BACKEND_BASE_LANES_H_

#define SLUICE_NUM_LANES 4

#endif /* SLUICE_BACKEND_BASE_LANES_H_ */
