// SPDX-License-Identifier: Apache-2.0
/* The scalars of the op's chunk, out to the experts and back: route weights and the gate's. How rows travel: travel.h.
 *
 * Each `_start` packs and posts one exchange; the op waits with sluice_finish. Two may be in flight (rows and scalars).
 * All of this runs on the communication lane, one op at a time, so its scratch is shared without locks. */
#ifndef SLUICE_BACKEND_MOE_OPS_EXCHANGE_OPS_H_
#define SLUICE_BACKEND_MOE_OPS_EXCHANGE_OPS_H_

#include "backend/moe/ops/transfer.h"

/* On a device, before an op unpacks: the exchange that the op before it left to this one, so that rows and route
 * weights arrive where experts read them. One group of messages. */
sluice_status_t sluice_land(sluice_pass_t* pass, const sluice_op_t* op);

/* The route weights that go with the tokens; sluice_unpack_route puts them into T_ROUTE. */
sluice_status_t sluice_send_route_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
void sluice_unpack_route(sluice_pass_t* pass, const sluice_op_t* op);

/* The gate's scalars (T_DGATE) back, into pass->gate_recv in sent order. */
sluice_status_t sluice_return_gate_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);

#endif /* SLUICE_BACKEND_MOE_OPS_EXCHANGE_OPS_H_ */
