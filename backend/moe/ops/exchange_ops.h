// SPDX-License-Identifier: Apache-2.0
/* Exchanges the scalars of the op's chunk: route weights to the experts, the gate's scalars back. Rows: travel.h.
 *
 * Each `_start` packs and posts one exchange; the op waits with sluice_finish. Two may be in flight (rows and scalars).
 * All of this runs on the communication lane, one op at a time, so its scratch is shared without locks. */
#ifndef SLUICE_BACKEND_MOE_OPS_EXCHANGE_OPS_H_
#define SLUICE_BACKEND_MOE_OPS_EXCHANGE_OPS_H_

#include "backend/moe/ops/transfer.h"

/* On a device, before an op unpacks: runs the exchange that the previous op left to it as one group of messages, so
 * that rows and route weights arrive where experts read them. */
sluice_status_t sluice_land(sluice_pass_t* pass, const sluice_op_t* op);

/* Sends the route weights with the tokens; sluice_unpack_route writes them to T_ROUTE. */
sluice_status_t sluice_send_route_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
void sluice_unpack_route(sluice_pass_t* pass, const sluice_op_t* op);

/* Returns the gate's scalars (T_DGATE) to pass->gate_recv, in sent order. */
sluice_status_t sluice_return_gate_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);

#endif /* SLUICE_BACKEND_MOE_OPS_EXCHANGE_OPS_H_ */
