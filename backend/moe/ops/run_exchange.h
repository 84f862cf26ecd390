// SPDX-License-Identifier: Apache-2.0
/* The exchanges of both directions: rows, and the scalars that an op sends with them (travel.h). */
#pragma once

#include "backend/moe/pass/pass.h"

/* An op outside of a group ends when its rows and scalars have arrived. An op that opens a group posts its rows; the op
 * that closes it posts its own rows, waits for both, and then exchanges the scalars of both: at most two exchanges are
 * in flight. */
sluice_status_t sluice_run_exchange(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);
