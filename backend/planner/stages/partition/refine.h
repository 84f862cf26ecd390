// SPDX-License-Identifier: Apache-2.0
/* Moves layers between neighbouring stages while that improves the worst stage: vPipe's refinement, judged with the
 * local choice of options. A layer that leaves the worst stage may push others on, stage by stage, until one has
 * room. */
#pragma once

#include "backend/planner/stages/partition/partition.h"

/* partition: settled before and after; its score never gets worse. Errors: NO_MEMORY. */
sluice_status_t sluice_partition_refine(sluice_partition_t* partition);
