// SPDX-License-Identifier: Apache-2.0
/* Replaces the placement of a layer's experts, on all ranks or on none. Private to moe. */
#pragma once

#include "backend/moe/layer/layer.h"

/* refusal: of the caller's checks, with its record; if OK, the placement is checked, else it is not read. Collective.
 * The calling thread has entered the context. */
sluice_status_t sluice_run_replace_experts(sluice_moe_t* moe, const sluice_expert_placement_t* placement,
                                           sluice_status_t refusal);
