// SPDX-License-Identifier: Apache-2.0
/* Under SLUICE_POISON: fills rows of a slot with NaN when the last op that releases it has ended, so that later uses
 * show. Slots of a step, which were given to the pass, are not filled. Private to moe.
 *
 * With device memory the fill is enqueued after that op on its lane, so the op also waits for the other ops that
 * release the slot. Only this order differs from a pass without poison. */
#pragma once

#include "backend/moe/pass/pass.h"

/* Called once slots are placed; pass->poisoner stays NULL if nothing is poisoned. Errors: NO_MEMORY. */
sluice_status_t sluice_slot_poisoner_begin(sluice_pass_t* pass);
/* Called when an op has ended, or is enqueued, before its waiters are notified. Any lane. Errors: EXTERNAL. */
sluice_status_t sluice_slot_poisoner_release(sluice_pass_t* pass, int32_t index);
/* The ops that this one waits for, its own dependencies first. Call it once for each op. Valid until the pass has
 * ended. */
const int32_t* sluice_slot_poisoner_waits(sluice_pass_t* pass, int32_t index, int32_t* out_count);
void sluice_slot_poisoner_end(sluice_pass_t* pass);
