/* Partitions that cut the order in which layers run. Of a chain there are no others, so that the best of them is the
 * best of all; of other graphs it is a good one to begin with. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_PARTITION_CUT_ORDER_H_
#define SLUICE_BACKEND_PLANNER_STAGES_PARTITION_CUT_ORDER_H_

#include "backend/planner/stages/partition/partition.h"

/* Sets and settles the partition with the fastest slowest stage. out_is_optimal: no cut of the order is better.
 * out_exists 0: none fits, and the partition stays what it was. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_fastest(sluice_partition_t* partition, int32_t* out_exists, int32_t* out_is_optimal);

/* Sets and settles the partition whose stages lack the fewest bytes of their budgets, exactly. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_leanest(sluice_partition_t* partition);

/* Whether any cut of the order fits. Where none does, the partition is set and settled as by _leanest; else nothing is
 * said of it. Costs little where budgets leave room. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_fits(sluice_partition_t* partition, int32_t* out_fits);

/* Rows of one number to each layer, divided evenly: what hosts do today, and a beginning for refinement. Sets and
 * settles. weights: [num_layers + 1] sums before a layer. Errors: NO_MEMORY. */
sluice_status_t sluice_cut_order_evenly(sluice_partition_t* partition, const double* weights);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_PARTITION_CUT_ORDER_H_ */
