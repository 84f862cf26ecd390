// SPDX-License-Identifier: Apache-2.0
/* Checks that all ranks give the same placement of experts; otherwise all refuse it. */
#pragma once

#include "backend/moe/layer/layer.h"

/* Exchanges one header. If placements differ, the ranks exchange the lists in pieces of fixed size, up to the first
 * entry that differs. placement: has been checked if refusal is OK. text: the refusal for the other ranks.
 * Errors: the refusal with its record; PEER_REFUSED; MISMATCH naming ranks and entry; what the communicator reports. */
sluice_status_t sluice_placement_agree(sluice_moe_t* moe, const sluice_expert_placement_t* placement,
                                       sluice_status_t refusal, const char* text);
