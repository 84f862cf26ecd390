// SPDX-License-Identifier: Apache-2.0
/* Under SLUICE_POISON: rows of a slot become NaN when the last of the ops that release it has ended, so that whoever
 * uses them after the schedule's marks is seen. Slots of a step's own, which a pass was given, stay. Private to moe.
 *
 * With device memory the rows are filled behind that op on its lane, so that it waits for the others that release the
 * slot with it: the one order there that a pass without poison has not. */
#ifndef SLUICE_BACKEND_MOE_PASS_SLOT_POISONER_H_
#define SLUICE_BACKEND_MOE_PASS_SLOT_POISONER_H_

#include "backend/moe/pass/pass.h"

/* Of a pass whose slots lie; pass->released stays NULL where nothing is poisoned. Errors: NO_MEMORY. */
sluice_status_t sluice_slot_poisoner_begin(sluice_pass_t* pass);
/* An op has ended, or is enqueued, and whoever waits for it does not know yet. Any lane. Errors: EXTERNAL. */
sluice_status_t sluice_slot_poisoner_release(sluice_pass_t* pass, int32_t index);
/* The ops that this one waits for, its own dependencies first; once for each op. Valid until the pass has ended. */
const int32_t* sluice_slot_poisoner_waits(sluice_pass_t* pass, int32_t index, int32_t* out_count);
void sluice_slot_poisoner_end(sluice_pass_t* pass);

#endif /* SLUICE_BACKEND_MOE_PASS_SLOT_POISONER_H_ */
