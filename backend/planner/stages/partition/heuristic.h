// SPDX-License-Identifier: Apache-2.0
/* vPipe's decomposition: a partition for given options, then options for that partition, repeated until nothing
 * improves. */
#pragma once

#include "backend/planner/stages/partition/partition.h"

/* Sets and settles the best partition found: by Kernighan and Lin alternating with the choice of options, and refined
 * from the even divisions that hosts use, so that it is never worse than these. scratch: another partition of the
 * tables. out_num_rounds: alternations. Errors: NO_MEMORY. */
sluice_status_t sluice_stages_search(sluice_partition_t* partition, sluice_partition_t* scratch, int32_t coarsen,
                                     int32_t* out_num_rounds);
