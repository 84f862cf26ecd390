// SPDX-License-Identifier: Apache-2.0
/* Routes under a capacity: each expert position has the same number of rows in each chunk, on all ranks. */
#pragma once

#include "backend/moe/routing/binding.h"

/* Orders routes under a capacity. Each position of a chunk gets exactly the layer's capacity of rows, so that no counts
 * are read or exchanged. Routes beyond it are dropped (position -1) and added to the drop counters
 * (device/drop_counters.h), which lie in row memory. Rows that no route takes are -1 in the orders. */
sluice_status_t sluice_binding_route_under_capacity(sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                                    int32_t num_chunks, int64_t* drop_counters,
                                                    sluice_binding_t* out_binding);
/* Fills in the counts, which are the same for all positions, chunks and ranks. */
void sluice_binding_fill_counts(sluice_binding_t* binding);
