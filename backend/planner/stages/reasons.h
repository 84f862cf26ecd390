// SPDX-License-Identifier: Apache-2.0
/* Explains why each layer has its option and why each stage begins at its first layer: the cost of the alternatives. */
#pragma once

#include "backend/planner/stages/partition/partition.h"

/* Fills the reasons of a plan that sluice_stages_predict has filled. partition: settled, of the plan; it is changed
 * temporarily and restored. */
void sluice_stages_give_reasons(sluice_partition_t* partition, sluice_stages_plan_t* plan);
