// SPDX-License-Identifier: Apache-2.0
/* Coarsens a graph of layers: short nests become one node each.
 *
 * An edge that spans more than a quarter of a stage's share of the seconds is long: any partition cuts it somewhere. A
 * place in the order that more than one short tensor crosses lies in a nest, and partitions should not cut there. A
 * nest heavier than that quarter is divided where the fewest bytes cross.
 *
 * Source: vPipe, coarsening by the distance of layers in execution order. Its threshold is not in the text that we
 * have: the quarter of a share is ours. */
#pragma once

#include "backend/planner/stages/problem/tables.h"

/* Nodes are runs of layers: out_first [num_layers + 1] has the first layer of each, followed by num_layers. Returns the
 * number of nodes, at least num_stages; if nests leave fewer, each layer is a node. scratch: [num_layers + 1]. */
int32_t sluice_stages_coarsen(const sluice_stages_tables_t* tables, int32_t* out_first, int32_t* scratch);
/* Makes each layer a node. */
int32_t sluice_stages_leave_fine(const sluice_stages_tables_t* tables, int32_t* out_first);
