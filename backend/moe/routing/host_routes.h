// SPDX-License-Identifier: Apache-2.0
/* Orders routes in host memory into chunks, also for calls without a layer's strategies. */
#pragma once

#include "backend/moe/routing/binding.h"

/* Orders the routes of `expert_ids` [T, K] and counts them; received rows are not known yet. Chunks start at
 * first_token [n + 1], or NULL: equal numbers of tokens. The arrays lie in the context's binding arena. Errors:
 * INVALID_ARGUMENT naming the entry that is out of range, NO_MEMORY. */
sluice_status_t sluice_binding_route(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                     const int64_t* first_token, sluice_binding_t* out_binding);
