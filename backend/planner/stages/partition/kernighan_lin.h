// SPDX-License-Identifier: Apache-2.0
/* Partitions a graph of nodes by recursive bipartition: half of the stages left, half right, and so on.
 *
 * Each bipartition begins with a cut of the order and improves as in Kernighan and Lin: a pass moves each node once,
 * the best one first even if the cost rises, and keeps the best prefix of that sequence. Nodes move singly, as in
 * Fiduccia and Mattheyses, because their weights differ. A move may not make an edge lead backwards. The cost is the
 * slower side's seconds per stage, or the messages between the sides if these take longer; then bytes.
 *
 * Source: vPipe's global algorithm; Kernighan and Lin 1970; Fiduccia and Mattheyses 1982. */
#pragma once

#include "backend/planner/stages/problem/tables.h"

/* first: [num_nodes + 1] of the runs of layers that form nodes. seconds_of: [num_layers]. out_stage_of: [num_layers].
 * Errors: NO_MEMORY. */
sluice_status_t sluice_stages_kernighan_lin(const sluice_stages_tables_t* tables, const int32_t* first,
                                            int32_t num_nodes, const double* seconds_of, int32_t* out_stage_of);
