// SPDX-License-Identifier: Apache-2.0
/* Routes under a capacity: every place has the same number of rows in each chunk, on all ranks. */
#ifndef SLUICE_BACKEND_MOE_ROUTING_CAPACITY_ROUTES_H_
#define SLUICE_BACKEND_MOE_ROUTING_CAPACITY_ROUTES_H_

#include "backend/moe/routing/binding.h"

/* Routes under a capacity: what a place of a chunk gets is always the layer's capacity, so that nothing is read and
 * nothing exchanged. Routes beyond it are dropped (position -1) and added to the drop counters
 * (device/drop_counters.h), which lies with the rows; rows that no route takes are -1 in the orders. */
sluice_status_t sluice_binding_route_under_capacity(sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                                    int32_t num_chunks, int64_t* drop_counters,
                                                    sluice_binding_t* out_binding);
/* Under a capacity: the same counts for all places, chunks and ranks. */
void sluice_binding_fill_counts(sluice_binding_t* binding);

#endif /* SLUICE_BACKEND_MOE_ROUTING_CAPACITY_ROUTES_H_ */
