/* Moves layers between neighbouring stages while that makes the worst stage better: vPipe's refinement, with the local
 * choice of options as its judge. A layer that leaves the worst stage may push others on, stage by stage, until one has
 * room. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_PARTITION_REFINE_H_
#define SLUICE_BACKEND_PLANNER_STAGES_PARTITION_REFINE_H_

#include "backend/planner/stages/partition/partition.h"

/* partition: settled, and settled afterwards; its score never gets worse. Errors: NO_MEMORY. */
sluice_status_t sluice_partition_refine(sluice_partition_t* partition);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_PARTITION_REFINE_H_ */
