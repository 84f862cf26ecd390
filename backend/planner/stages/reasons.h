/* Why each layer has its option, and why each stage begins where it does: what would be otherwise. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_REASONS_H_
#define SLUICE_BACKEND_PLANNER_STAGES_REASONS_H_

#include "backend/planner/stages/partition/partition.h"

/* Fills the reasons of a plan that sluice_stages_predict has filled. partition: settled, the plan's; it is changed and
 * is the same afterwards. */
void sluice_stages_give_reasons(sluice_partition_t* partition, sluice_stages_plan_t* plan);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_REASONS_H_ */
