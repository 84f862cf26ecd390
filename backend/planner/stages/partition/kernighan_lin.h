/* Partition of a graph of nodes by recursive bipartition: half of the stages left, half right, and again.
 *
 * Each bipartition begins with a cut of the order and improves as Kernighan and Lin do: a pass moves one node after the
 * other, each once, the best one first even where it makes things worse, and keeps the best beginning of that sequence.
 * Nodes move singly, as Fiduccia and Mattheyses have it, because they are not of equal weight. Only moves along which
 * no edge leads back are allowed. What counts is the slower side's seconds to a stage, or the messages between the
 * sides where these take longer; then bytes.
 *
 * Source: vPipe's global algorithm; Kernighan and Lin 1970; Fiduccia and Mattheyses 1982. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_PARTITION_KERNIGHAN_LIN_H_
#define SLUICE_BACKEND_PLANNER_STAGES_PARTITION_KERNIGHAN_LIN_H_

#include "backend/planner/stages/problem/tables.h"

/* first: [num_nodes + 1] of the runs of layers that are nodes. seconds_of: [num_layers]. out_stage_of: [num_layers].
 * Errors: NO_MEMORY. */
sluice_status_t sluice_stages_kernighan_lin(const sluice_stages_tables_t* tables, const int32_t* first,
                                            int32_t num_nodes, const double* seconds_of, int32_t* out_stage_of);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_PARTITION_KERNIGHAN_LIN_H_ */
