/* Under SLUICE_POISON, on a CPU: rows of a slot become NaN when the last of the ops that release it has ended, so that
 * whoever uses them after the schedule's marks is seen. Slots of a step's own, which a pass was given, stay. Private to
 * moe. */
#ifndef SLUICE_BACKEND_MOE_RELEASED_H_
#define SLUICE_BACKEND_MOE_RELEASED_H_

#include "backend/moe/pass.h"

/* Of a pass whose slots lie; pass->released stays NULL where nothing is poisoned. Errors: NO_MEMORY. */
sluice_status_t sluice_released_begin(sluice_pass_t* pass);
/* An op has ended, and whoever waits for it does not know yet. Any lane. */
void sluice_released_by(sluice_pass_t* pass, const sluice_op_t* op);
void sluice_released_end(sluice_pass_t* pass);

#endif /* SLUICE_BACKEND_MOE_RELEASED_H_ */
