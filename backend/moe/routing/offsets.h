// SPDX-License-Identifier: Apache-2.0
/* Derives all offsets of a binding from its counts. */
#pragma once

#include "backend/moe/routing/binding.h"

/* Binds rows that are already sorted by local expert, for the experts alone: one chunk, no tokens. */
sluice_status_t sluice_binding_of_rows(sluice_moe_t* moe, const int64_t* rows_per_expert,
                                       sluice_binding_t* out_binding);
/* Derives all offsets once recv_counts are filled in. */
sluice_status_t sluice_binding_finish(sluice_binding_t* binding);
