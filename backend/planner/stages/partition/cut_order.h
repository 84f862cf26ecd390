// SPDX-License-Identifier: Apache-2.0
/* Partitions that cut the execution order. A chain has no others, so the best of them is the optimum; for other graphs
 * the best cut is a good start. */
#pragma once

#include "backend/planner/stages/partition/partition.h"

/* Sets and settles the partition with the fastest slowest stage. out_is_optimal: no cut of the order is better.
 * out_exists 0: none fits, and the partition is unchanged. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_fastest(sluice_partition_t* partition, int32_t* out_exists, int32_t* out_is_optimal);

/* Sets and settles the partition whose stages exceed their budgets by the fewest bytes, exactly. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_leanest(sluice_partition_t* partition);

/* Finds out whether any cut of the order fits. If none does, the partition is set and settled as by _leanest; otherwise
 * it is undefined. Fast if budgets leave room. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_fits(sluice_partition_t* partition, int32_t* out_fits);

/* Divides the layers evenly by one number per layer, as hosts do today; a start for refinement. Sets and settles.
 * weights: [num_layers + 1] sums before a layer. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_evenly(sluice_partition_t* partition, const double* weights);
