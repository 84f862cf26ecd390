// SPDX-License-Identifier: Apache-2.0
/* The exchanges of both directions: rows, and beside them the scalars that an op sends along (travel.h). */
#ifndef SLUICE_BACKEND_MOE_OPS_RUN_EXCHANGE_H_
#define SLUICE_BACKEND_MOE_OPS_RUN_EXCHANGE_H_

#include "backend/moe/pass/pass.h"

/* An op that stands alone has ended with its rows and scalars. One that opens a group posts its rows; the one that
 * closes it posts its own, waits for both, and then exchanges the scalars of both: two exchanges are in flight at the
 * most. */
sluice_status_t sluice_run_exchange(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);

#endif /* SLUICE_BACKEND_MOE_OPS_RUN_EXCHANGE_H_ */
