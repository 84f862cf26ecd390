// SPDX-License-Identifier: Apache-2.0
/* Placements: from the host's two lists to the tables of a layer, by position (layer.h). These functions allocate
 * nothing, so that replacing a placement cannot fail for lack of memory. */
#pragma once

#include "backend/base/status.h"
#include "sluice/moe.h"

/* The rank of an expert by these lists. expert_rank NULL: contiguous, the same number of experts on each rank. */
int32_t sluice_placement_rank(const sluice_expert_placement_t* placement, int32_t num_experts, int32_t world_size,
                              int32_t expert);

/* Checks that the lists put every expert into a slot of its own and leave no slot of a rank empty. Errors:
 * INVALID_ARGUMENT naming the entry. */
sluice_status_t sluice_placement_check(const sluice_expert_placement_t* placement, int32_t layer_id,
                                       int32_t num_experts, int32_t world_size);

/* Fills expert_position [E] and first_position [W + 1] from a checked placement. */
void sluice_placement_fill(const sluice_expert_placement_t* placement, int32_t num_experts, int32_t world_size,
                           int32_t* out_expert_position, int32_t* out_first_position);

/* Whether every rank owns as many experts as in first_position [W + 1]. */
int sluice_placement_has_numbers(const sluice_expert_placement_t* placement, int32_t num_experts, int32_t world_size,
                                 const int32_t* first_position);

/* The rank of a position: the last rank with experts whose positions begin at or before it. */
int32_t sluice_rank_of_position(const int32_t* first_position, int32_t world_size, int32_t position);
