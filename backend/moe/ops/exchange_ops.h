// SPDX-License-Identifier: Apache-2.0
/* Exchanges the scalars of the op's chunk: route weights to the experts, the gate's scalars back. Rows: travel.h.
 *
 * Each `_start` packs and posts one exchange; the op waits with sluice_finish. Two may be in flight (rows and scalars).
 * All of this runs on the communication lane, one op at a time, so its scratch is shared without locks. */
#pragma once

#include "backend/moe/ops/transfer.h"

/* Unpacks the rows of `tokens`, and those of a backward's route weights, into `tensor` and T_ROUTE. On a device it also
 * runs the exchange that the previous op left to it, as one group of messages, so that rows arrive where experts read
 * them; the rank's own rows are copied meanwhile. */
sluice_status_t sluice_unpack(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                              int32_t tensor);

/* Sends the route weights with the tokens. */
sluice_status_t sluice_send_route_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);

/* After an op's exchange: waits for the own rows that were copied meanwhile. */
sluice_status_t sluice_join_own(sluice_pass_t* pass, const sluice_op_t* op);

/* Returns the gate's scalars (T_DGATE) to pass->gate_recv, in sent order. */
sluice_status_t sluice_return_gate_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer);
