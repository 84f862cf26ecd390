// SPDX-License-Identifier: Apache-2.0
/* The exchanges of both directions: rows (travel.h), and the scalars that an op sends with them: route weights to the
 * experts, the gate's scalars back.
 *
 * Each `_start` packs and posts one exchange; the op waits with sluice_finish. Two may be in flight (rows and scalars).
 * All of this runs on the communication lane, one op at a time, so its scratch is shared without locks. */
#pragma once

#include "backend/moe/ops/travel.h"

/* An op outside of a group ends when its rows and scalars have arrived. An op that opens a group posts its rows; the op
 * that closes it posts its own rows, waits for both, and then exchanges the scalars of both: at most two exchanges are
 * in flight. index: of the op. */
sluice_status_t sluice_run_exchange(sluice_pass_t* pass, const sluice_op_t* op, int32_t index);

/* The ops within a node of an exchange in two levels. tokens: the rows that the preceding dispatch sent. */
sluice_status_t sluice_node_dispatch(sluice_pass_t* pass, const sluice_op_t* op, int32_t index,
                                     const sluice_tensor_t* tokens);
/* tensor: the rows to be summed, T_DO or dT_DI. */
sluice_status_t sluice_node_combine(sluice_pass_t* pass, const sluice_op_t* op, int32_t index, int32_t tensor);

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
