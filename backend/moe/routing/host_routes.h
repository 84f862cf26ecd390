// SPDX-License-Identifier: Apache-2.0
/* Orders routes in host memory into chunks. */
#pragma once

#include "backend/moe/routing/binding.h"

/* Orders the routes of `expert_ids` [T, K] and counts them; received rows are not known yet. Chunks start at
 * first_token [n + 1], or NULL: equal numbers of tokens. The arrays lie in the context's binding arena. Errors:
 * INVALID_ARGUMENT naming the entry that is out of range, NO_MEMORY. */
sluice_status_t sluice_binding_route(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                     const int64_t* first_token, sluice_binding_t* out_binding);
/* The same with chunks cut out of rows (chunks_by_experts.h). */
sluice_status_t sluice_binding_route_rows(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                          sluice_binding_t* out_binding);
/* Counts routes per chunk and place; leaves each route's place in `position`. */
sluice_status_t sluice_binding_count_routes(sluice_binding_t* binding, const sluice_tensor_t* expert_ids);
